"""The report on the console: tables, verdicts and notes, with rich.

Cells are plain ASCII, so that log files and narrow terminals show them, too. Strings from the results are `Text`
objects, so rich markup and terminal escapes in them have no effect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncline.report.compare import Row, rows, share
from syncline.report.figures import (
    NONE,
    accuracy,
    between,
    duration,
    number,
    percent,
    printable,
    significant,
    times,
)
from syncline.report.scaling import Curve, curves
from syncline.report.verdict import cautions, headline, verdicts
from syncline.results.file import finite
from syncline.results.schema import Results
from syncline.stats import Summary

WIDE = 132
"""From this many columns on, the comparison is one table; below, it is two."""


@dataclass(frozen=True)
class Column:
    """A heading and the function that formats a row's cell."""

    head: str
    cell: Callable[[Row], str]


def _key(name: str, show: Callable[[float | None], str]) -> Callable[[Row], str]:
    return lambda row: show(finite(row.run.get(name)))


def _quartiles(step: Summary) -> str:
    return between(finite(step.get("q1")), finite(step.get("q3")))


def _milliseconds(value: float | None) -> str:
    return NONE if value is None else significant(value)


def _megabytes(value: float | None) -> str:
    return NONE if value is None else significant(value / 1e6)


def _share(part: str) -> Callable[[Row], str]:
    return lambda row: percent(share(row.run, part)) if row.run.get("breakdown") else NONE


def _against_theory(row: Row) -> str:
    if row.wire_ratio is not None:
        return percent(row.wire_ratio)
    return "theory" if row.run.get("wire") and not row.run["wire"].get("measured") else NONE


_TIME = (
    Column("ranks", lambda row: str(row.run.get("world_size", NONE))),
    Column("step\nms", lambda row: _milliseconds(row.median)),
    Column("q1-q3", lambda row: _quartiles(row.run["step_ms"]) if "step_ms" in row.run else NONE),
    Column("first", _key("first_step_ms", _milliseconds)),
    Column("samples\n/s", _key("samples_per_s", _milliseconds)),
    Column("speed\n-up", lambda row: times(row.speedup)),
    Column("eff.", lambda row: percent(row.efficiency)),
)
_COST = (
    Column("wire\nMB", _key("wire_bytes_per_step", _megabytes)),
    Column("of\ntheory", _against_theory),
    Column("exch.", _share("exposed_exchange")),
    Column("wait", _share("wait")),
    Column("loss", lambda row: number(row.final_loss)),
    Column("accu-\nracy", _key("test_accuracy", accuracy)),
)
_STATUS = Column("status", lambda row: "ok" if row.ok else "crashed")
_GAP = Column("max loss\ndifference", lambda row: number(row.loss_difference, digits=2))


def print_summary(results: Results, console: Console) -> None:
    """Print the tables, a verdict for each strategy, and the cautions."""
    show(console, [*comparison(results, width=console.width), *scaling(results)])
    console.print(Text(printable(headline(results)), style="bold"))
    for verdict in verdicts(results):
        line = Text("- ") + Text(printable(verdict.label), style="bold") + Text(": " + printable(verdict.sentence))
        console.print(line, style=None if verdict.ok else "red")
        for remark in verdict.remarks:
            console.print(Text(f"  {printable(remark)}"), style="dim")
    for caution in [*results.get("warnings", []), *cautions(results)]:
        console.print(Text(f"Note: {printable(caution)}", style="yellow"))


def comparison(results: Results, *, width: int) -> list[Table]:
    """The summary: one table if `width` allows it, else two (time, then cost)."""
    table = rows(results)
    if width >= WIDE:
        return [_columns(table, (*_TIME, *_COST, _STATUS))]
    return [_columns(table, (*_TIME, _STATUS), title="time"), _columns(table, (*_COST, _GAP), title="cost and result")]


def scaling(results: Results) -> list[Table]:
    """A table for each strategy that ran at several world sizes."""
    return [_scaling(curve) for curve in curves(results)]


def show(console: Console, tables: Sequence[Table]) -> None:
    """Print tables with a blank line between them. Long cells are folded, never cut."""
    for table in tables:
        if table.row_count:
            console.print(table)
            console.print()


def _scaling(curve: Curve) -> Table:
    heads = (
        "ranks",
        "first\nepoch",
        "later\nepochs",
        "step",
        "samples\n/s",
        "speed\n-up",
        "eff.",
        "whole\nrun",
        "speed\n-up",
    )
    table = simple_table(f"scaling of {printable(curve.strategy)}", *heads)
    for point in curve.points:
        table.add_row(
            str(point.world_size),
            duration(point.first_epoch_s * 1000 if point.first_epoch_s is not None else None),
            duration(point.later_epoch_s * 1000 if point.later_epoch_s is not None else None),
            duration(point.step_ms),
            _milliseconds(point.samples_per_s),
            times(point.speedup),
            percent(point.efficiency),
            duration(point.whole_s * 1000 if point.whole_s is not None else None),
            times(point.whole_speedup),
        )
    return table


def _columns(table: Sequence[Row], columns: Sequence[Column], *, title: str | None = None) -> Table:
    out = simple_table(title, "strategy", *[column.head for column in columns])
    for row in table:
        style = None if row.ok else "red"
        out.add_row(_text(row.label), *[column.cell(row) for column in columns], style=style)
    return out


def simple_table(title: str | None, first: str, *heads: str) -> Table:
    """An empty table with a left column and right-aligned columns, in the style of all our console tables."""
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column(first, overflow="fold", min_width=min(len(first), 8))
    for head in heads:
        table.add_column(Text(head), justify="right", no_wrap=True)
    return table


def _text(value: object) -> Text:
    return Text(printable(value))
