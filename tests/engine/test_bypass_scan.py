"""The bypass scan: of all torch functions, those that read a pending tensor without waiting are the documented ones."""

import warnings
from pathlib import Path
from typing import Any

import bypass_scan
import pytest
import torch
from touch_recipes import COLLECTIVES, RECIPES, TYPED

from ranks import run_ranks
from syncline.engine.inflight import unguarded

ENGINE_PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
NUMBERS = ("torch.arange", "torch.range", "torch.nn.functional.rrelu", "torch.nn.functional.threshold")
"""A tensor with one value, given where a function wants a number: torch asks nobody before it reads it."""
EXCEPTIONS = {*NUMBERS, *TYPED}
"""Functions that read without waiting; docs/engine.md has a row for each."""
FEWEST = 1350
"""Functions that the scan must really exercise, so that it cannot become empty unseen."""


def scan(rank: int, world: int, functions: tuple[str, ...], left_out: str) -> dict[str, Any]:
    """Scan all public functions (or some), without the replacement of `left_out`."""
    torch.sparse.check_sparse_tensor_invariants.enable()  # else senseless arguments could crash the process
    warnings.simplefilter("ignore")
    if left_out:
        complete = unguarded.readers
        unguarded.readers = lambda: [(owner, name) for owner, name in complete() if name != left_out]
    end = unguarded.guard_process()
    try:
        public = bypass_scan.public_functions()
        found = bypass_scan.scan({name: public[name] for name in functions} if functions else public)
        bypass_scan.try_recipes({} if functions else {**RECIPES, **COLLECTIVES, **TYPED}, found)
    finally:
        end()
    return {"exercised": len(found.exercised), "guarded": len(found.guarded), "bypasses": found.bypasses}


@pytest.mark.timeout(240)
def test_only_documented_functions_bypass_the_guard() -> None:
    (found,) = run_ranks(scan, 1, (), "", timeout=220)
    assert set(found["bypasses"]) == EXCEPTIONS
    assert found["exercised"] >= FEWEST
    page = ENGINE_PAGE.read_text()
    assert [name for name in EXCEPTIONS if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("function", "replacement"),
    [("torch.tensor", "tensor"), ("torch.func.vmap", "_add_batch_dim_impl"), ("torch.distributed.scatter", "scatter")],
)
def test_the_scan_finds_a_replacement_that_is_missing(function: str, replacement: str) -> None:
    (found,) = run_ranks(scan, 1, (function,), replacement)
    assert set(found["bypasses"]) == {function}
