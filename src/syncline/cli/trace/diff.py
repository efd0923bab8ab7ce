"""`syncline trace diff`: compare the steps of two traces, phase by phase, for people and for CI."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.app import new_app
from syncline.cli.output import print_json, say
from syncline.errors import UsageError
from syncline.report.figures import one_line, plural
from syncline.trace.analysis.diff import Change, Diff, Side, side
from syncline.trace.analysis.diff import diff as compare
from syncline.trace.formats.load import TRACE, load

app = new_app()


@app.command()
def diff(
    a: Annotated[
        Path, typer.Argument(help=f"The trace to compare with: a run folder, a strategy's folder, a {TRACE}.")
    ],
    b: Annotated[Path, typer.Argument(help="The trace in question.")],
    threshold: Annotated[
        str, typer.Option(help="How much slower B may be, as a share of A's step, before the exit code is 1.")
    ] = "5%",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")] = False,
) -> None:
    """Compare two traces, phase by phase, with confidence intervals.

    The exit code is 0 if B is not slower, 1 if it is slower by more than chance and the threshold allow, and 2 if
    the traces cannot be read or hold too few steps to tell.
    """
    share = _share(threshold)
    told = compare(_side(a), _side(b), threshold=share)
    if as_json:
        print_json(told.as_json())
    else:
        say(_text(told))
        if told.kind == "unknown":
            print(f"syncline: {told.sentence}", file=sys.stderr)
    raise typer.Exit(told.exit_code)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise UsageError(f"--threshold {text}: write a share, such as 5% or 0.05")
    return share


def _side(path: Path) -> Side:
    trace = load(path)
    return side(trace, source=str(trace.path))


def _text(told: Diff) -> str:
    lines = [_head("A", told.a), _head("B", told.b)]
    lines += [f"note: {text}" for text in told.notes]
    for name, one in (("A", told.a), ("B", told.b)):
        lines += [f"note: {name}: {text}" for text in one.analysis.notes]
    lines += ["", f"{'ms per step':<18}{'A':>10}{'B':>10}{'B - A':>10}  {'95% interval':<20}{'B / A':>7}"]
    rows = {"step": told.step, "with slow steps": told.slow_steps, **told.phases}
    there = {name: change for name, change in rows.items() if change.a_ms or change.b_ms}
    lines += [_row(name.replace("_", " "), change) for name, change in there.items()]
    lines += ["", *_others(told), *_units(told), "", told.sentence]
    return "\n".join(lines)


def _head(name: str, one: Side) -> str:
    told = one.analysis
    ranks = plural(told.world_size, "rank")
    return f"{name}: {one.source} ({told.strategy or 'a trace'}, {ranks}, {len(one.steps)} steady steps)"


def _row(name: str, change: Change) -> str:
    between = "-" if change.interval_ms is None else f"{change.interval_ms[0]:+.2f} to {change.interval_ms[1]:+.2f}"
    ratio = "-" if change.ratio is None else f"{change.ratio:.2f}"
    mark = "" if not change.significant else "  slower" if change.difference_ms > 0 else "  faster"
    figures = f"{change.a_ms:10.2f}{change.b_ms:10.2f}{change.difference_ms:+10.2f}"
    return f"{name:<18}{figures}  {between:<20}{ratio:>7}{mark}"


def _others(told: Diff) -> list[str]:
    rows: list[tuple[str, Any, Any, str]] = [
        ("communication hidden", told.a.analysis.communication, told.b.analysis.communication, "{:.0%}"),
        ("compression hidden", told.a.analysis.compression, told.b.analysis.compression, "{:.0%}"),
        ("MB a step", told.a.bytes / 1e6, told.b.bytes / 1e6, "{:.2f}"),
    ]
    return [
        f"{name:<22}" + "".join(f"{'-' if value is None else form.format(value):>10}" for value in (left, right))
        for name, left, right, form in rows
        if left is not None or right is not None
    ]


def _units(told: Diff) -> list[str]:
    if not told.units:
        return []
    labels = [one_line(f"{row['name']} {row['unit']}") for row in told.units]
    width = max(map(len, labels))
    lines = [
        "",
        f"{'units that changed most, ms per step'.ljust(width)}  {'exposed A':>10}{'B':>9}{'transfer A':>12}{'B':>9}",
    ]
    for row, label in zip(told.units, labels, strict=True):
        cells = ["-" if row[key] is None else f"{row[key]:.2f}"
                 for key in ("a_exposed_ms", "b_exposed_ms", "a_transfer_ms", "b_transfer_ms")]  # fmt: skip
        lines.append(f"{label.ljust(max(width, 33))}  {cells[0]:>10}{cells[1]:>9}{cells[2]:>12}{cells[3]:>9}")
    return lines
