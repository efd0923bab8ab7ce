"""Table of `bench models` for the terminal and for the page, and the page itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from syncline.report.bench_pages import Table, models_page
from syncline.report.figures import NONE, Columns, number, printable, significant, size, tabulate

Row = Mapping[str, Any]


def _faster(row: Row) -> str:
    found = row["times_faster_than_ddp"]
    return f"{found['median']:.2f}x" if found else NONE


def _range(row: Row) -> str:
    found = row["times_faster_than_ddp"]
    return f"{found['low']:.2f}-{found['high']:.2f}" if found else NONE


_CELL: Columns = (
    ("model", lambda row: printable(row["model"])),
    ("network", lambda row: printable(row["bandwidth"])),
)
_RANGE: Columns = (("range", _range),)
_FIGURES: Columns = (
    ("strategy", lambda row: printable(row["strategy"]) + (" (crashed)" if row["status"] == "crashed" else "")),
    ("step ms", lambda row: significant(row["step_ms"])),
    ("samples/s", lambda row: significant(row["samples_per_s"])),
    ("vs ddp", _faster),
    ("sent", lambda row: size(row["wire_bytes"])),
    ("memory", lambda row: size(row["peak_memory_bytes"])),
    ("loss", lambda row: number(row["loss"])),
    ("dense", lambda row: number(row["loss_dense"])),
)


def _table(columns: Columns, rows: Sequence[Row]) -> Table:
    bad = frozenset(number for number, row in enumerate(rows) if row["status"] == "crashed")
    return Table(*tabulate(columns, rows), bad)


def console_tables(result: Row) -> Any:
    """A table for each model and bandwidth, for a terminal; needs rich."""
    from rich.console import Group

    from syncline.report.tables import simple_table

    cells = dict.fromkeys((row["model"], row["bandwidth"]) for row in result["rows"])
    tables = []
    for cell in cells:
        table = _table(_FIGURES, [row for row in result["rows"] if (row["model"], row["bandwidth"]) == cell])
        heads = [head.replace(" ", "\n") for head in table.headings]
        tables.append(simple_table(printable(", ".join(cell)), heads, table.rows, bad=table.bad))
        tables[-1].columns[0].min_width = 18
    return Group(*tables)


def page(result: Row) -> str:
    """The HTML page as text."""
    return models_page(result, _table((*_CELL, *_FIGURES, *_RANGE), result["rows"]))
