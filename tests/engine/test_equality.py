"""Dense attach is DDP: every loop of the table (`equality_*.py`), over an exchange that answers late.

20 steps of all rows with 2 ranks, 10 of the core with 1, 4 and (marker `full`) 3.

With 1 and 2 ranks to the bit (a sum of two has one order, and a share of 1/2 is exact); only a second backward
without `no_sync` is compared to rounding, because DDP averages the first mean once more. With 3 and 4 ranks to
rounding, because the backend's order of summation depends on the sizes of messages: float32 with SGD (rtol 1e-4,
atol 1e-6), float64 with AdamW and LBFGS (1e-8, 1e-10), which make full steps of gradients that are only rounding;
bf16 5e-2, 5e-3.
"""

import time
from functools import cache
from typing import Any

import pytest
import torch
from equality_run import SLOW, rows, run_rows
from equality_table import CASES

from ranks import run_ranks
from syncline import exchange
from syncline.codecs import Mean

GROUP = 32
"""How many rows one start of ranks runs: each stays far below a test's time limit."""


def parts(world: int) -> list[Any]:
    marks = [pytest.mark.full] if world == 3 else []
    return [pytest.param(world, i // GROUP, row, marks=marks) for i, row in enumerate(rows(world))]


@cache
def problems(world: int, wanted: tuple[str, ...]) -> dict[str, str | None]:
    found: dict[str, str | None] = run_ranks(run_rows, world, list(wanted), SLOW, timeout=115)[0]
    return found


@pytest.mark.parametrize(
    ("world", "part", "row"), [p for world in (1, 2, 3, 4) for p in parts(world)], ids=lambda value: str(value)
)
def test_dense_attach_is_ddp(world: int, part: int, row: str, request: pytest.FixtureRequest) -> None:
    # The chosen rows of one part run together, at the first of them.
    chosen = [item.callspec.params for item in request.session.items if item.originalname == request.node.originalname]
    together = tuple(p["row"] for p in chosen if (p["world"], p["part"]) == (world, part))
    problem = problems(world, together)[row]
    if problem:
        pytest.fail(problem, pytrace=False)


def test_the_table_has_every_optimizer_and_runs_the_core_everywhere() -> None:
    assert {row.rsplit("-", 1)[0] for row in rows(2)} == set(CASES)
    for world in (1, 3, 4):
        assert {row.rsplit("-", 1)[0] for row in rows(world)} == {name for name, case in CASES.items() if case.core}


def slow_and_plain(rank: int, world: int) -> tuple[bool, float]:
    links = [exchange.connect("allreduce"), exchange.connect("slow_exchange:slow(ms=40)")]
    same, began = True, time.monotonic()
    for number in range(7):
        values = torch.randn(1000 + number, generator=torch.Generator().manual_seed(number + 10 * rank))
        same &= torch.equal(*(link.ask(Mean(values)) for link in links))
    return same, time.monotonic() - began


def test_the_slow_exchange_is_all_reduce_and_slow() -> None:
    for same, seconds in run_ranks(slow_and_plain, 3):
        assert same
        assert seconds > 0.04 * 5
