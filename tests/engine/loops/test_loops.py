"""`attach` trains as DDP does: every loop of the table in five or six ways (see `ways.py`), compared with a reference.

All rows with 2 ranks over the late exchange, every eighth one in one more way, the core in every fourth way; half of
the core also with 1 rank, and the other half with 4. With `--full` all ways, and the whole core with 1, 3 and 4 ranks.
With 1 and 2 ranks bit for bit (a sum of two has one order, and a share of 1/2 is exact), but where a row says
otherwise. With 3 and 4 ranks to rounding, because the backend's order of summation depends on the sizes of messages:
float32 with SGD, and float64 with optimizers that make full steps of gradients that are only rounding.
"""

import re
import time
from functools import cache
from typing import Any

import pytest
import torch

from loops.run_rows import SUBJECTS, run_rows
from loops.table import ROWS, Row
from loops.touches import READS
from ranks import run_ranks
from syncline import exchange
from syncline.codecs import Mean

OTHER_WORLDS = {1: "dense", 3: "fine", 4: "fine"}
"""The way in which the core runs with other numbers of ranks."""


def cells(world: int) -> list[Any]:
    """One parameter set for each row and way; rows of a subject run in one start of ranks."""
    if world == 2:
        return [
            pytest.param(2, r.subject, f"{r.name}-{way}", marks=[] if _is_usual(number, r, way) else [pytest.mark.full])
            for number, r in enumerate(ROWS.values())
            for way in r.ways
        ]
    core = [f"{r.name}-{OTHER_WORLDS[world]}" for r in ROWS.values() if r.core]
    usual = {1: core[1::2], 3: [], 4: core[::2]}[world]
    return [pytest.param(world, "core", name, marks=[] if name in usual else [pytest.mark.full]) for name in core]


def _is_usual(number: int, row: Row, way: str) -> bool:
    """Whether this cell runs without `--full`: the late exchange, a quarter of the core's ways, one more in some rows.

    Each way to read a tensor is used for parameters or for gradients.
    """
    others = [other for other in row.ways if other != "fine"]
    if way == "fine" and (found := re.fullmatch(r"(parameter|gradient)_by_(\w+)", row.name)):
        # The same read of the other kind: parameters and gradients in flight have the same class, whose touches wait.
        return found[2] not in READS or (found[1] == "parameter") == (list(READS).index(found[2]) % 2 == 0)
    if row.core:
        return way == "fine" or others.index(way) % 4 == number % 4
    return way == "fine" or (number % 8 == 0 and way == others[number // 8 % len(others)])


@cache
def problems(world: int, wanted: tuple[str, ...]) -> dict[str, str | None]:
    try:
        found: dict[str, str | None] = run_ranks(run_rows, world, list(wanted), timeout=110)[0]
    except (RuntimeError, TimeoutError) as error:  # kept: the ranks are not started again for the next row
        found = dict.fromkeys(wanted, f"the ranks that run all of these rows failed: {error}")
    return found


@pytest.mark.parametrize(("world", "part", "cell"), [p for world in (1, 2, 3, 4) for p in cells(world)], ids=str)
def test_loop(world: int, part: str, cell: str, request: pytest.FixtureRequest) -> None:
    # The chosen rows of one part run together, at the first of them.
    chosen = [item.callspec.params for item in request.session.items if item.originalname == request.node.originalname]
    together = tuple(p["cell"] for p in chosen if (p["world"], p["part"]) == (world, part))
    found = problems(world, together)
    if found[cell]:
        pytest.fail(str(found[cell]), pytrace=False)


def test_the_table_is_large_and_every_file_of_it_is_used() -> None:
    assert len(ROWS) >= 150
    assert {row.subject for row in ROWS.values()} == set(SUBJECTS)


def slow_and_plain(rank: int, world: int) -> tuple[bool, float]:
    links = [exchange.connect("allreduce"), exchange.connect("loops.slow_exchange:slow(ms=40)")]
    same, began = True, time.monotonic()
    for number in range(7):
        values = torch.randn(1000 + number, generator=torch.Generator().manual_seed(number + 10 * rank))
        same &= torch.equal(*(link.ask(Mean(values)) for link in links))
    return same, time.monotonic() - began


def test_the_slow_exchange_is_all_reduce_and_slow() -> None:
    for same, seconds in run_ranks(slow_and_plain, 3):
        assert same
        assert seconds > 0.04 * 5
