"""The report on the console: tables, verdicts and notes, with rich.

Cells are significant ASCII, so that log files and narrow terminals show them, too. Strings from the results are `Text`
objects, so rich markup and terminal escapes in them have no effect.
"""

import math
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from syncline.report.compare import Row, rows, share
from syncline.report.figures import (
    NONE,
    Columns,
    accuracy,
    between,
    duration,
    number,
    percent,
    printable,
    seconds,
    significant,
    tabulate,
    times,
)
from syncline.report.scaling import curves
from syncline.report.verdict import cautions, headline, verdicts
from syncline.results.file import finite
from syncline.results.schema import Results

WIDE = 132
"""From this many columns on, the comparison is one table; below, it is two."""


def _key(name: str, show: Callable[[float | None], str]) -> Callable[[Row], str]:
    return lambda row: show(finite(row.run.get(name)))


def _share(part: str) -> Callable[[Row], str]:
    return lambda row: percent(share(row.run, part)) if row.run.get("breakdown") else NONE


def _megabytes(value: float | None) -> str:
    return significant(None if value is None else value / 1e6)


def _quartiles(row: Row) -> str:
    step = row.run.get("step_ms", {})
    return between(finite(step.get("q1")), finite(step.get("q3")))


def _against_theory(row: Row) -> str:
    if row.wire_ratio is not None:
        return percent(row.wire_ratio)
    computed = row.run.get("wire_bytes_per_step") and not row.run.get("wire", {}).get("measured")
    return "formula" if computed else NONE


_NAME: Columns = (("strategy", lambda row: row.label),)
_TIME: Columns = (
    ("ranks", lambda row: str(row.run.get("world_size", NONE))),
    ("step\nms", lambda row: significant(row.median)),
    ("q1-q3", _quartiles),
    ("first", _key("first_step_ms", significant)),
    ("samples\n/s", _key("samples_per_s", significant)),
    ("speed\n-up", lambda row: times(row.speedup)),
    ("eff.", lambda row: percent(row.efficiency)),
)
_COST: Columns = (
    ("wire\nMB", _key("wire_bytes_per_step", _megabytes)),
    ("of\ntheory", _against_theory),
    ("exch.", _share("exposed_exchange")),
    ("wait", _share("wait")),
    ("loss", lambda row: number(row.final_loss)),
    ("accu-\nracy", _key("test_accuracy", accuracy)),
)
_STATUS: Columns = (("status", lambda row: "ok" if row.ok else "crashed"),)
_GAP: Columns = (("max loss\ndifference", lambda row: number(row.loss_difference, digits=2)),)
_SCALING: Columns = (
    ("ranks", lambda point: str(point.world_size)),
    ("first\nepoch", lambda point: seconds(point.first_epoch_s)),
    ("later\nepochs", lambda point: seconds(point.later_epoch_s)),
    ("step", lambda point: duration(point.step_ms)),
    ("samples\n/s", lambda point: significant(point.samples_per_s)),
    ("speed\n-up", lambda point: times(point.speedup)),
    ("eff.", lambda point: percent(point.efficiency)),
    ("whole\nrun", lambda point: seconds(point.whole_s)),
    ("speed\n-up", lambda point: times(point.whole_speedup)),
)


def _payback(change: Any) -> str:
    """After how many steps a change had gained its cost; more than there were in brackets."""
    count, after = change["payback_steps"], change.get("steps_after")
    if count is None:
        return "not yet" if change["saved_ms"] is None else "never"
    return str(math.ceil(count)) if after is None or count <= after else f"not yet ({math.ceil(count)})"


_RESTRUCTURINGS: Columns = (
    ("change", lambda change: f"{change['kind']}: {change['what']}"),
    ("after\nstep", lambda change: str(change["step"] + 1)),
    ("cost", lambda change: duration(change["cost_ms"])),
    ("saved\nper step", lambda change: duration(change["saved_ms"])),
    ("paid back\nafter steps", _payback),
)


def print_summary(results: Results, console: Console) -> None:
    """Print the tables, a verdict for each strategy, and the cautions."""
    show(console, [*comparison(results, width=console.width), *scaling(results), *restructurings(results)])
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
    bad = {number for number, row in enumerate(table) if not row.ok}
    parts: dict[str, Columns] = {"time": (*_TIME, *_STATUS), "cost and result": (*_COST, *_GAP)}
    if width >= WIDE:
        parts = {"": (*_TIME, *_COST, *_STATUS)}
    return [simple_table(title, *tabulate((*_NAME, *columns), table), bad=bad) for title, columns in parts.items()]


def scaling(results: Results) -> list[Table]:
    """A table for each strategy that ran at several world sizes."""
    return [
        simple_table(f"scaling of {printable(curve.strategy)}", *tabulate(_SCALING, curve.points))
        for curve in curves(results)
    ]


def restructurings(results: Results) -> list[Table]:
    """A table of freezes and reshapes for each strategy that has some."""
    return [
        simple_table(f"freezes and reshapes of {printable(row.label)}", *tabulate(_RESTRUCTURINGS, changes))
        for row in rows(results)
        if (changes := row.run.get("restructurings"))
    ]


def show(console: Console, tables: Sequence[Table]) -> None:
    """Print tables with a blank line between them. Long cells are folded, never cut."""
    for table in tables:
        if table.row_count:
            console.print(table)
            console.print()


def simple_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, bad: Container[int] = (), fold: bool = False
) -> Table:
    """A table with a left column and right-aligned columns, in the style of all our console tables.

    The rows whose numbers are in `bad` are red. `fold` lets all cells take several lines, not only those on the left.
    """
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column(heads[0], overflow="fold", min_width=min(len(heads[0]), 8))
    for head in heads[1:]:
        table.add_column(Text(head), justify="right", no_wrap=not fold, overflow="fold")
    for place, cells in enumerate(rows):
        style = "red" if place in bad else None
        name, *figures = map(printable, cells)
        table.add_row(_Name(name), *map(Text, figures), style=style)
    return table


@dataclass(frozen=True)
class _Name:
    """A name that takes several lines where it has to, and is broken after a bracket, comma or colon, not in a word."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(cell_len, self._pieces()), default=0), cell_len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for piece in self._pieces():
            if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += piece
        yield Text("\n".join(line.rstrip() for line in lines), overflow="fold")

    def _pieces(self) -> list[str]:
        return re.findall(r"[^(,:|\s]+[(,:|\s]*|[(,:|\s]+", self.text)
