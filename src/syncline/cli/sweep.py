"""Rows of `syncline simulate --sweep` (nodes by bandwidths) as text, and where compression pays."""

from collections.abc import Mapping, Sequence
from typing import Any

from syncline.cluster.quantities import format_bandwidth
from syncline.report.figures import text_table

HEADINGS = ("nodes", "bandwidth", "dense ms", "bf16 ms", "compressed ms", "codec", "")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a row, in the order of `HEADINGS`."""
    times = (f"{row[key]:.1f}" for key in ("dense_ms", "bf16_ms", "ms"))
    pays = f"pays, {row['gain']:.2f}x" if row["pays"] else ""
    return (str(row["nodes"]), format_bandwidth(row["bandwidth"]), *times, row["codec"], pays)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each pair: dense, bf16, best compressed, and whether that pays."""
    return text_table(HEADINGS, [cells(row) for row in rows], left=(5, 6))


def verdict(pays: Sequence[Mapping[str, Any]], highest: float) -> str:
    """For each number of nodes, the bandwidth below which compression pays."""
    lines = ["compression beyond bf16 pays"]
    for entry in pays:
        below = entry["below"]
        said = f"up to {format_bandwidth(highest)} and beyond" if below is None else f"below {format_bandwidth(below)}"
        lines.append(f"  on {entry['nodes']} nodes: {'never here' if below == 0 else said}")
    return "\n".join(lines)
