"""Table of `bench overlap` for the terminal (in two parts) and for the page, the verdict, and the page itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from syncline.report.bench_pages import Table, overlap_page
from syncline.report.figures import NONE, between, number, one_line, printable, significant, times

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A heading and the function that formats a row's cell."""

    head: str
    cell: Callable[[Row], str]


def _figure(key: str, *, scale: float = 1.0, digits: int = 4) -> Callable[[Row], str]:
    """A cell with a number. Tiny values (the bytes of a heartbeat) are shown as 0."""

    def cell(row: Row) -> str:
        if row[key] is None:
            return NONE
        return significant(row[key] / scale, digits=digits) if row[key] / scale >= 0.001 else "0"

    return cell


def _faster(family: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row["times_faster_than"].get(family)
        return NONE if not found else f"{found['median']:.2f}x"

    return cell


_COST = (
    Column("wire MB", _figure("wire_bytes", scale=1e6, digits=3)),
    Column("wire ms", _figure("wire_ms")),
    Column("bound ms", _figure("bound_ms")),
    Column("predicted ms", _figure("predicted_ms")),
    Column("error", lambda row: NONE if row["prediction_error"] is None else f"{row['prediction_error']:+.0%}"),
    Column("loss", lambda row: number(row["loss_last"])),
    Column("dense loss", lambda row: number(row["loss_dense"])),
)


def time_columns(result: Row) -> list[Column]:
    """Step time, ratio to the bound, and time of each rival relative to ours."""
    families = dict.fromkeys(family for row in result["rows"] for family in row["times_faster_than"])
    return [
        Column("step ms", _figure("step_ms")),
        Column("range", lambda row: between(row["step_ms_low"], row["step_ms_high"])),
        Column("of bound", lambda row: times(row["to_bound"]).replace("x", "")),
        *(Column(f"vs {family.partition('(')[0]}", _faster(family)) for family in families),
    ]


def headings(result: Row) -> list[str]:
    """All headings, the name of the contestant first."""
    return ["strategy", *(column.head for column in [*time_columns(result), *_COST])]


def cells(row: Row, result: Row) -> list[str]:
    """The cells of a row, in the order of `headings`."""
    return [label(row), *(column.cell(row) for column in [*time_columns(result), *_COST])]


def label(row: Row) -> str:
    """Name of the contestant; a star marks the best of those that differ in bucket size only."""
    crashed = " (crashed)" if row["status"] == "crashed" else ""
    return printable(row["strategy"]) + ("*" if row["best_of_family"] else "") + crashed


def page(result: Row) -> str:
    """The HTML page as text."""
    crashed = frozenset(number for number, row in enumerate(result["rows"]) if row["status"] == "crashed")
    table = Table(headings(result), [cells(row, result) for row in result["rows"]], crashed)
    return overlap_page(result, table, sentences=verdicts(result))


def print_tables(result: Row, console: Any) -> None:
    """Print the tables on a terminal of at least 80 columns; needs rich."""
    from rich.text import Text

    setting = result["setting"]
    title = f"{setting['model']}, batch {setting['batch']}, {setting['ranks']} ranks"
    title += f", {setting['bandwidth']}" if setting["bandwidth"] else ""
    console.print(_rich(f"time of a step: {title}", time_columns(result), result))
    console.print()
    console.print(_rich(f"bytes, prediction, and the loss at step {result['loss_step']}", _COST, result))
    for row in result["rows"]:
        if row["error"]:
            text = f"{row['strategy']} crashed on rank {row['error']['rank']}: {one_line(row['error']['summary'])}"
            console.print(Text(printable(text), style="red"))
    for sentence in verdicts(result):
        console.print(Text(printable(sentence), style="bold"))


def verdicts(result: Row) -> list[str]:
    """A sentence that compares the two contestants whose timelines are shown."""
    rows = {row["strategy"]: row for row in result["rows"]}
    if len(result["pictured"]) < 2:
        return []
    rival, ours = (rows[name] for name in result["pictured"])
    found = ours["times_faster_than"].get(rival["family"])
    if not found:
        return []
    text = f"{ours['strategy']} takes {significant(ours['step_ms'])} ms per step, {rival['strategy']} takes"
    text += f" {significant(rival['step_ms'])} ms: {found['median']:.2f} times as long"
    text += f" ({found['low']:.2f} to {found['high']:.2f} over the rounds)"
    if ours["to_bound"] is not None:
        text += f"; ours takes {ours['to_bound']:.2f} times its bound of {significant(ours['bound_ms'])} ms"
    return [text + "."]


def _rich(title: str, columns: Any, result: Row) -> Any:
    from rich.text import Text

    from syncline.report.tables import simple_table

    heads = [column.head.replace("-", "- ").replace(" ", "\n") for column in columns]
    table = simple_table(title, "strategy", *heads)
    table.columns[0].min_width = 18
    for row in result["rows"]:
        style = "red" if row["status"] == "crashed" else None
        table.add_row(Text(label(row)), *(column.cell(row) for column in columns), style=style)
    return table
