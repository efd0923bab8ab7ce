"""Table and HTML page of `bench convergence`."""

from typing import Any

from syncline.bench.output import rich_table
from syncline.report.bench_pages import Table, convergence_page

HEADINGS = ("codec", "accuracy", "points below dense", "final loss", "wire ratio", "MB to dense accuracy")


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of a row, in the order of `HEADINGS`."""
    reached = row["bytes_to_dense_accuracy"]
    return [
        row["codec"],
        f"{row['accuracy']:.1%}",
        f"{row['points_below_dense']:+.1f}",
        f"{row['final_loss']:.4f}",
        f"{row['wire_ratio']:.1f}",
        "not reached" if reached is None else f"{reached / 1e6:.2f}",
    ]


def console_table(result: dict[str, Any]) -> Any:
    """The table for a terminal; needs rich."""
    title = f"convergence on {result['setting']['data']}"
    return rich_table(title, HEADINGS, [cells(row) for row in result["rows"]])


def page(result: dict[str, Any]) -> str:
    """The HTML page as text. Codecs that lose more than a point are marked."""
    bad = frozenset(number for number, row in enumerate(result["rows"]) if not row["within_a_point"])
    return convergence_page(result, Table(HEADINGS, [cells(row) for row in result["rows"]], bad))
