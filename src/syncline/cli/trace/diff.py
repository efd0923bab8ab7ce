"""`syncline trace diff`: compare the steps of two traces by phase and by operator, for people and for CI."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.app import new_app
from syncline.cli.output import print_json, say
from syncline.cli.trace.inputs import LimitOption, parse_limits
from syncline.errors import UsageError
from syncline.report.figures import NONE, one_line, percent, plural, text_table
from syncline.trace.analysis.diff import Change, Diff, Side, side
from syncline.trace.analysis.diff import diff as compare
from syncline.trace.formats.json_stream import Limits
from syncline.trace.formats.load import TRACE, load

_UNIT_KEYS = ("a_exposed_ms", "b_exposed_ms", "a_transfer_ms", "b_transfer_ms")

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
    limit: LimitOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")] = False,
) -> None:
    """Compare two traces by phase, operator and unit, with confidence intervals.

    The exit code is 0 if B is not slower, 1 if it is slower by more than chance and the threshold allow, and 2 if
    the traces cannot be read or hold too few steps to tell.
    """
    share = _share(threshold)
    limits = parse_limits(limit)
    result = compare(_side(a, limits), _side(b, limits), threshold=share)
    if as_json:
        print_json(result.as_json())
    else:
        say(_text(result))
        if result.kind == "unknown":
            print(f"syncline: {result.sentence}", file=sys.stderr)
    raise typer.Exit(result.exit_code)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise UsageError(f"--threshold {text}: write a share, such as 5% or 0.05")
    return share


def _side(path: Path, limits: Limits | None) -> Side:
    trace = load(path, limits=limits)
    return side(trace, source=str(trace.path))


def _text(result: Diff) -> str:
    sides = {"A": result.a, "B": result.b}
    lines = [_head(name, one) for name, one in sides.items()]
    lines += [f"note: {text}" for text in result.notes]
    lines += [f"note: {name}: {text}" for name, one in sides.items() for text in one.analysis.notes]
    changes = {"step": result.step, "with slow steps": result.slow_steps, **result.phases}
    rows = [_cells(name.replace("_", " "), change) for name, change in changes.items() if change.a_ms or change.b_ms]
    lines += ["", text_table(("ms per step", "A", "B", "B - A", "95% interval", "B / A", ""), rows, left=(0, 6)), ""]
    pairs = {
        "communication hidden": [percent(one.analysis.communication) for one in sides.values()],
        "compression hidden": [percent(one.analysis.compression) for one in sides.values()],
        "MB per step": [f"{one.bytes / 1e6:.2f}" for one in sides.values()],
    }
    known = [[name, *figures] for name, figures in pairs.items() if figures != [NONE, NONE]]
    lines += [text_table(("", *sides), known), ""]
    if result.operators:
        rows = [_cells(one_line(name), change) for name, change in result.operators.items()]
        titles = ("operators that changed most, ms", "A", "B", "B - A", "95% interval", "B / A", "")
        lines += [text_table(titles, rows, left=(0, 6)), ""]
    if result.units:
        units = [
            [one_line(f"{row['name']} {row['unit']}"), *(_ms(row[key]) for key in _UNIT_KEYS)] for row in result.units
        ]
        headings = ("units that changed most, ms per step", "exposed A", "B", "transfer A", "B")
        lines += [text_table(headings, units), ""]
    return "\n".join([*lines, result.sentence])


def _head(name: str, one: Side) -> str:
    ranks, steps = plural(one.analysis.world_size, "rank"), plural(len(one.steps), "steady step")
    return f"{name}: {one.source} ({one.analysis.strategy or 'a trace'}, {ranks}, {steps})"


def _cells(name: str, change: Change) -> list[str]:
    between = NONE if change.interval_ms is None else "{:+.2f} to {:+.2f}".format(*change.interval_ms)
    ratio = NONE if change.ratio is None else f"{change.ratio:.2f}"
    mark = "" if not change.significant else "slower" if change.difference_ms > 0 else "faster"
    difference = f"{change.difference_ms:+.2f}"
    return [name, _ms(change.a_ms), _ms(change.b_ms), difference, between, ratio, mark]


def _ms(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
