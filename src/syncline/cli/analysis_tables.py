"""The analysis of a trace for a terminal: the verdict first, then what it rests on."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncline.report.figures import one_line, printable
from syncline.report.scaling import Curve, StartUp
from syncline.trace.analysis.analysis import Analysis
from syncline.trace.analysis.critical_path import Piece
from syncline.trace.analysis.findings import Finding
from syncline.trace.span import PHASES

_SHORT = {
    "data": "data", "forward": "forw.", "backward": "backw.", "exposed_encode": "enc.", "exposed_exchange": "exch.",
    "wait": "wait", "update": "upd.", "other": "other",
}  # fmt: skip
_FIRST = 3  # findings beside the verdict
_RANKS = 16
_NOTHING = 0.05  # of a step
_NARROW = 70
_WIDE = 100
"""Columns of a terminal that has room for everything."""


def one_run(console: Console, told: Analysis, source: str, *, top: int, start: StartUp | None = None) -> None:
    """Everything on one run; `start` is what its results say of the time outside its steps."""
    _line(console, f"trace: {source}")
    _line(console, f"{_head(told)}")
    _verdict(console, told)
    console.print(_breakdown(told) if console.width >= _NARROW else _upright(told))
    _exchanges(console, told)
    if told.units:
        console.print(_units(told, top, wide=console.width >= _WIDE))
    _startup(console, told)
    if start is not None:
        _outside(console, start)
    _path(console, told.critical_path, told.critical_step, top)
    _bound(console, told)
    for note in told.notes:
        _line(console, f"note: {note}")


def several_runs(
    console: Console, found: Mapping[str, Analysis], scaling: Sequence[Curve], folder: Path, *, notes: Sequence[str]
) -> None:
    """A row a run, each with its verdict, how a strategy scales, and what is missing."""
    phases = _seen(told.breakdown for told in found.values()) if console.width >= _WIDE else []
    table = _table("runs", "run", "ranks", "step ms", *(_SHORT[phase] for phase in phases), "verdict")
    for name, told in found.items():
        shares = [_percent(told.breakdown[phase]) for phase in phases]
        table.add_row(
            Text(printable(name)), str(told.world_size), _ms(told.step_ms["median"]), *shares, told.verdict.kind
        )
    console.print(table)
    for name, told in found.items():
        _line(console, f"{name}: {_sentence(told.verdict)}")
    for curve in scaling:
        console.print()
        console.print(_scaling(curve))
    for note in notes:
        _line(console, f"note: {note}")
    _line(console, f"more on one of them: syncline trace analyze {folder} --run {next(iter(found))}")


def _head(told: Analysis) -> str:
    what = told.strategy or told.imported or "a trace"
    ranks = f"{told.world_size} rank{'s' if told.world_size != 1 else ''}"
    step = told.step_ms
    steady = len(told.steps) - told.startup.steps
    return (
        f"{what}, {ranks}, steps {told.steps[0]} to {told.steps[-1]}: {_ms(step['median'])} ms a step (median of"
        f" {steady} steady ones; mean {_ms(step['mean'])}, 95% below {_ms(step['p95'])})"
    )


def _verdict(console: Console, told: Analysis) -> None:
    console.print()
    console.print(Text.assemble("verdict: ", (told.verdict.kind, "bold")))
    _line(console, _sentence(told.verdict))
    for finding in told.findings[1 : 1 + _FIRST]:
        kind = "" if finding.kind == "unclear" else f" {finding.kind}"
        _line(console, f"also{kind}: {_sentence(finding)}")
    console.print()


def _sentence(finding: Finding) -> str:
    gain = "" if finding.recoverable_ms is None else f" Recoverable: {_ms(finding.recoverable_ms)} ms a step."
    return finding.sentence + gain


def _breakdown(told: Analysis) -> Table:
    phases = _seen([told.breakdown])
    table = _table("ms a step, mean", "rank", "step", *(_SHORT[phase] for phase in phases))
    for rank in told.ranks[:_RANKS]:
        table.add_row(str(rank.rank), _ms(rank.step_ms["mean"]), *(_ms(rank.breakdown_ms[phase]) for phase in phases))
    if len(told.ranks) > _RANKS:
        table.add_row(f"... {len(told.ranks) - _RANKS} more", *([""] * (1 + len(phases))))
    table.add_row("share", "", *(_percent(told.breakdown[phase]) for phase in phases))
    return table


def _upright(told: Analysis) -> Table:
    """The same for a narrow terminal: a row a phase, the first ranks beside each other."""
    shown = told.ranks[:3]
    table = _table("ms a step, mean", "", *(f"rank {rank.rank}" for rank in shown), "share")
    for phase in _seen([told.breakdown]):
        ms = [_ms(rank.breakdown_ms[phase]) for rank in shown]
        table.add_row(_long(phase), *ms, _percent(told.breakdown[phase]))
    table.add_row("step", *(_ms(rank.step_ms["mean"]) for rank in shown), "")
    return table


def _seen(breakdowns: Iterable[Mapping[str, float]]) -> list[str]:
    """The phases that take any time: a narrow terminal has no room for the others."""
    rows = list(breakdowns)
    return [phase for phase in PHASES if any(row[phase] >= 0.0005 for row in rows)]


def _exchanges(console: Console, told: Analysis) -> None:
    wire = told.wire
    if wire is None:
        _line(console, "exchanges: none")
        return
    parts = [f"exchanges: {wire.messages:.3g} a step, {_size(wire.bytes)}", f"{_ms(wire.busy_ms)} ms of transfer"]
    parts.append(f"{_ms(wire.wait_ms)} ms of waiting for late ranks")
    if told.communication is not None:
        parts.append(f"{_percent(told.communication)} of the transfers behind compute")
    if told.compression is not None:
        parts.append(f"{_percent(told.compression)} of the compression behind compute")
    _line(console, ", ".join(parts))
    if wire.bits:
        how = {"fitted": "from messages of several sizes", "link": "the link's", "seen": "bytes over time"}
        _line(
            console,
            f"a message costs {wire.latency_ms:.2f} ms and its bytes at {_bits(wire.bits)}"
            f" ({how.get(wire.known, 'assumed')})",
        )
    for late in told.late[:4]:
        doing = f", in {_long(late.doing)}" if late.doing else ""
        _line(console, f"late: rank {late.rank}, {_percent(late.share)} of waits, {_ms(late.wait_ms)} ms a step{doing}")
    console.print()


def _units(told: Analysis, top: int, *, wide: bool) -> Table:
    title = f"units by exposed time ({min(top, len(told.units))} of {len(told.units)}), ms from the step's start"
    more = ("ready", "wait", "Mbit/s") if wide else ()
    table = _table(title, "unit", "size", "launch", "end", "moving", "exposed", *more)
    for unit in told.units[:top]:
        repeats = f" x{unit.count:.3g}" if unit.count > 1.01 else ""
        size = _size(unit.bytes) if unit.bytes else "-"
        rate = f"{unit.bandwidth_bits / 1e6:,.0f}" if unit.bandwidth_bits else "-"
        extra = (_ms(unit.ready_ms), _ms(unit.wait_ms), rate) if wide else ()
        times = (unit.launch_ms, unit.end_ms, unit.transfer_ms, unit.exposed_ms)
        table.add_row(Text(one_line(unit.unit or unit.name) + repeats), size, *map(_ms, times), *extra)
    return table


def _startup(console: Console, told: Analysis) -> None:
    start = told.startup
    if start.extra_ms < _NOTHING * start.steady_ms:
        _line(console, "start-up: none, the first step takes no longer than others")
        return
    reasons = ", ".join(f"{_long(phase)} {_ms(ms)}" for phase, ms in start.causes[:4])
    first = f"the first {start.steps} steps take" if start.steps > 1 else "the first step takes"
    _line(
        console,
        f"start-up: {first} {_ms(start.extra_ms)} ms more than steady ones ({_ms(start.first_step_ms)} ms for the"
        f" first, {_ms(start.steady_ms)} ms steady){': ' + reasons if reasons else ''}",
    )


def _outside(console: Console, start: StartUp) -> None:
    before = [f"{name} {_ms(ms)} ms" for name, ms in start.parts if name != "first step"]
    if before:
        _line(console, f"before the first step: {', '.join(before)}")
    if start.later_epoch_s is not None:
        _line(console, f"epochs: {start.first_epoch_s:.1f} s the first, {start.later_epoch_s:.1f} s each later one")


def _path(console: Console, pieces: Sequence[Piece], step: int, top: int) -> None:
    """The longest pieces in the order of time; what lies between is summed up."""
    least = 0.01 * sum(piece.ms for piece in pieces)
    longest = sorted((n for n, piece in enumerate(pieces) if piece.ms >= least), key=lambda n: -pieces[n].ms)[:top]
    shown = [
        f"rank {pieces[place].rank} {_long(pieces[place].lane)}{_named(pieces[place].unit)} {_ms(pieces[place].ms)}"
        for place in sorted(longest)
    ]
    rest = sum(piece.ms for place, piece in enumerate(pieces) if place not in set(longest))
    more = f" (+ {_ms(rest)} ms in {len(pieces) - len(longest)} short pieces)" if len(pieces) > len(longest) else ""
    _line(console, f"critical path of step {step}, ms: {' > '.join(shown)}{more}")


def _bound(console: Console, told: Analysis) -> None:
    bound = told.bound
    if bound.bound_ms is None or bound.distance is None:
        _line(console, "bound: not known, the trace holds no compute")
        return
    on_wire = "not known" if bound.wire_ms is None else f"{_ms(bound.wire_ms)} ms"
    _line(
        console,
        f"bound: {_ms(bound.bound_ms)} ms = max(compute {_ms(bound.compute_ms or 0.0)} ms, wire {on_wire}); the step is"
        f" {bound.distance:+.0%} from it",
    )


def _scaling(curve: Curve) -> Table:
    names = ("ranks", "step ms", "speed-up", "efficiency", "first epoch s", "later s", "with start-up")
    table = _table(f"scaling of {curve.strategy}", *names)
    for p in curve.points:
        table.add_row(
            str(p.world_size),
            *(_or_none(value, "{:.1f}") for value in (p.step_ms,)),
            _or_none(p.speedup, "{:.2f}x"),
            _or_none(p.efficiency, "{:.0%}"),
            _or_none(p.first_epoch_s, "{:.1f}"),
            _or_none(p.later_epoch_s, "{:.1f}"),
            _or_none(p.whole_speedup, "{:.2f}x"),
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=Text(printable(title)), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.padding = (0, 1, 0, 0)
    for place, name in enumerate(columns):
        if place == 0:
            table.add_column(name, overflow="fold", min_width=8)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def _line(console: Console, text: str) -> None:
    # A line is one line: names of others may hold anything.
    console.print(Text(printable(text).replace("\n", " ")), soft_wrap=not console.is_terminal)


def _or_none(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


def _named(unit: str) -> str:
    return f" {unit}" if unit else ""


def _long(phase: str) -> str:
    words = {
        "other": "unrecorded work",
        "exposed_encode": "encoding",
        "exposed_exchange": "exchange",
        "replan": "planning",
        "probe": "measuring",
    }
    return words.get(phase, phase)


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _size(size: float) -> str:
    return _scaled(size, ("B", "kB", "MB", "GB"))


def _bits(rate: float) -> str:
    return _scaled(rate, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"))


def _scaled(value: float, units: Iterable[str]) -> str:
    *smaller, last = units
    for unit in smaller:
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {last}"
