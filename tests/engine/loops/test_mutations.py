"""Every row can fail: with one wait or rule taken out of the engine, rows of the table no longer pass."""

from functools import partial

import pytest

from loops.mutations import MUTATIONS
from loops.run_rows import run_rows
from loops.table import ROWS
from ranks import run_ranks


@pytest.mark.parametrize("fault", MUTATIONS)
def test_rows_fail_without_a_wait(fault: str) -> None:
    """A few rows that need just this wait: all of them fail without it (`test_loops.py` shows that they pass)."""
    cells = list(MUTATIONS[fault].rows)
    problems = run_ranks(partial(run_rows, mutation=fault), 2, cells, timeout=100)[0]
    assert [cell for cell, problem in problems.items() if problem is None] == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", MUTATIONS)
def test_how_many_rows_fail_without_a_wait(fault: str) -> None:
    """The table in docs/engine.md: all rows in one way with each fault."""
    way = MUTATIONS[fault].way
    cells = [f"{row.name}-{way}" for row in ROWS.values() if way in row.ways]
    failed = 0
    for first in range(0, len(cells), 60):
        problems = run_ranks(partial(run_rows, mutation=fault), 2, cells[first : first + 60], timeout=240)[0]
        failed += sum(problem is not None for problem in problems.values())
    print(f"{fault}: {failed} of {len(cells)} rows fail ({way})")
    assert failed >= len(MUTATIONS[fault].rows)
