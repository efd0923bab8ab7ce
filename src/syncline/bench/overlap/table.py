"""Table of `bench overlap` for the terminal (in two parts) and for the page, the verdict, and the page itself."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from syncline.report.bench_pages import Table, overlap_page
from syncline.report.figures import NONE, Columns, between, number, one_line, printable, significant, tabulate, times

Row = Mapping[str, Any]


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


def _faster_than(which: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row.get(f"times_faster_than_{which}")  # files of earlier versions have none
        return NONE if not found else f"{found['median']:.2f}x"

    return cell


_MOST_FAMILIES = 4
"""With more kinds of rivals, only the best one has a column on a terminal."""

_COST: Columns = (
    ("wire MB", _figure("wire_bytes", scale=1e6, digits=3)),
    ("wire ms", _figure("wire_ms")),
    ("memory MB", lambda row: significant(row["peak_memory_bytes"] / 1e6) if row.get("peak_memory_bytes") else NONE),
    ("bound ms", _figure("bound_ms")),
    ("predicted ms", _figure("predicted_ms")),
    ("error", lambda row: NONE if row["prediction_error"] is None else f"{row['prediction_error']:+.0%}"),
    ("loss", lambda row: number(row["loss_last"])),
    ("dense loss", lambda row: number(row["loss_dense"])),
)


def _time_columns(result: Row, *, most: int = sys.maxsize) -> Columns:
    """Step time, ratio to the bound, and the times of the best rival and of each kind of rival relative to ours."""
    families = dict.fromkeys(family for row in result["rows"] for family in row["times_faster_than"])
    names = Counter(family.partition("(")[0] for family in families)
    shown = {f: f.partition("(")[0] if names[f.partition("(")[0]] == 1 else f for f in families}
    return (
        ("step ms", _figure("step_ms")),
        ("range", lambda row: between(row["step_ms_low"], row["step_ms_high"])),
        ("of bound", lambda row: times(row["to_bound"]).replace("x", "")),
        *([("vs best", _faster_than("best"))] if len(families) > 1 else []),
        *([("vs first", _faster_than("first"))] if result.get("stages") else []),
        *((f"vs {label}", _faster(family)) for family, label in shown.items() if len(families) <= most),
    )


def _label(row: Row) -> str:
    """Name of the contestant, or what its row of an ablation adds; a star marks the best of a kind."""
    crashed = " (crashed)" if row["status"] == "crashed" else ""
    name = row.get("stage") or row["strategy"]  # files of earlier versions have no stage
    return printable(name) + ("*" if row["best_of_family"] else "") + crashed


def _crashed(result: Row) -> frozenset[int]:
    return frozenset(number for number, row in enumerate(result["rows"]) if row["status"] == "crashed")


def page(result: Row) -> str:
    """The HTML page as text."""
    columns: Columns = (("strategy", _label), *_time_columns(result), *_COST)
    table = Table(*tabulate(columns, result["rows"]), _crashed(result))
    return overlap_page(result, table, sentences=verdicts(result))


def print_tables(result: Row, console: Any) -> None:
    """Print the tables on a terminal of at least 80 columns; needs rich."""
    from rich.text import Text

    from syncline.report.tables import show, simple_table

    setting = result["setting"]
    title = f"{setting['model']}, batch {setting['batch']}, {setting['ranks']} ranks"
    title += f", {setting['bandwidth']}" if setting["bandwidth"] else ""
    parts = {
        f"time of a step: {title}": _time_columns(result, most=_MOST_FAMILIES),
        f"bytes, prediction, and the loss at step {result['loss_step']}": _COST,
    }
    tables = []
    for title, columns in parts.items():
        heads, rows = tabulate((("strategy", _label), *columns), result["rows"])
        heads = [head.replace("-", "- ").replace(" ", "\n") for head in heads]
        tables.append(simple_table(title, heads, rows, bad=_crashed(result)))
        tables[-1].columns[0].min_width = 18
    show(console, tables)
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
