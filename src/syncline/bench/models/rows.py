"""Rows of `bench models`, made from the result of a contest of `bench overlap`. Pure functions."""

from collections.abc import Sequence
from typing import Any

from syncline.bench.models.cells import REFERENCE, Cell
from syncline.bench.overlap.rows import Entry, compare


def contest_rows(cells: Sequence[Cell], result: dict[str, Any], *, measured: str) -> list[dict[str, Any]]:
    """One row for each cell of a contest; losses are those of the last step that all contestants have reached."""
    by_strategy = {row["strategy"]: row for row in result["rows"]}
    reference, batch = by_strategy[REFERENCE], result["setting"]["batch"]
    made = []
    for cell in cells:
        row = by_strategy[cell.strategy]
        step = row["step_ms"]
        pair = compare(_entry(row), _entry(reference)) if cell.strategy != REFERENCE else None
        made.append(
            {
                "model": cell.model,
                "strategy": cell.strategy,
                "bandwidth": cell.bandwidth,
                "step_ms": step,
                "step_ms_low": row["step_ms_low"],
                "step_ms_high": row["step_ms_high"],
                "samples_per_s": batch / step * 1e3 if step else None,
                "wire_bytes": row["wire_bytes"],
                "peak_memory_bytes": row["peak_memory_bytes"],
                "loss": row["loss_last"],
                "loss_dense": row["loss_dense"],
                "loss_step": result["loss_step"],
                "times_faster_than_ddp": pair,
                "compute_ms": row["compute_ms"],
                "status": row["status"],
                "error": row["error"],
                "setting": result["setting"],
                "link": result["link"],
                "busy_before": result["environment"]["busy_before"],
                "measured": measured,
            }
        )
    return made


def _entry(row: dict[str, Any]) -> Entry:
    return Entry(row["strategy"], turns=row["turns"])


def merged(before: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], order: Sequence[Cell]) -> list[Any]:
    """All rows, each cell once, in the order of the table.

    A reference that was measured before stays: rows of later contests have their own one inside their ratio.
    """
    found = {cell_of(row): row for row in (*new, *before)}
    place = {cell: number for number, cell in enumerate(order)}
    return sorted(found.values(), key=lambda row: place.get(cell_of(row), len(place)))


def cell_of(row: dict[str, Any]) -> Cell:
    """The cell of a row."""
    return Cell(row["model"], row["bandwidth"], row["strategy"])
