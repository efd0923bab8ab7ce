"""Table and HTML page of `bench convergence`."""

from typing import Any

from syncline.report.bench_pages import Table, convergence_page
from syncline.report.figures import Columns, tabulate

COLUMNS: Columns = (
    ("codec", lambda row: row["codec"]),
    ("accuracy", lambda row: f"{row['accuracy']:.1%}"),
    ("points below dense", lambda row: f"{row['points_below_dense']:+.1f}"),
    ("final loss", lambda row: f"{row['final_loss']:.4f}"),
    ("wire ratio", lambda row: f"{row['wire_ratio']:.1f}"),
    ("MB to dense accuracy", lambda row: _megabytes(row["bytes_to_dense_accuracy"])),
)


def console_table(result: dict[str, Any]) -> Any:
    """The table for a terminal; needs rich."""
    from syncline.report.tables import simple_table

    title = f"convergence on {result['setting']['data']}"
    return simple_table(title, *tabulate(COLUMNS, result["rows"]), fold=True)


def page(result: dict[str, Any]) -> str:
    """The HTML page as text. Codecs that lose more than a point are marked."""
    bad = frozenset(number for number, row in enumerate(result["rows"]) if not row["within_a_point"])
    return convergence_page(result, Table(*tabulate(COLUMNS, result["rows"]), bad))


def _megabytes(reached: float | None) -> str:
    return "not reached" if reached is None else f"{reached / 1e6:.2f}"
