"""The analysis of a trace as text for a terminal: the verdict first, then the tables behind it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncline.cli.trace.gpu_tables import print_gpu
from syncline.report.figures import (
    Columns,
    bandwidth,
    one_line,
    percent,
    plural,
    printable,
    significant,
    size,
    tabulate,
)
from syncline.report.scaling import StartUp
from syncline.report.tables import scaling, show, simple_table
from syncline.results.schema import Results
from syncline.trace.analysis.analyze import Analysis
from syncline.trace.analysis.findings import Finding
from syncline.trace.span import PHASES

_SHORT = {
    "data": "data", "forward": "forw.", "backward": "backw.", "exposed_encode": "enc.", "exposed_exchange": "exch.",
    "wait": "wait", "update": "upd.", "between": "betw.", "other": "other",
}  # fmt: skip
_LONG = {"other": "unrecorded work", "exposed_encode": "encoding", "exposed_exchange": "exchange"}
_LONG |= {"between": "between steps"}
_LONG |= {"replan": "planning", "probe": "measuring"}
_MORE_FINDINGS = 3  # shown after the verdict
_MOST_RANKS = 16
_NEGLIGIBLE_START = 0.05  # of a step
_NO_LONGER = 0.005  # of the bound: less is rounded to nothing
_NARROW, _WIDE = 70, 100  # columns of a terminal


def print_run(console: Console, analysis: Analysis, source: str, *, top: int, start: StartUp | None = None) -> None:
    """Print everything about one run. `start` is the time outside its steps, from its results."""
    _line(console, f"trace: {source}")
    _line(console, f"{_head(analysis)}")
    _verdict(console, analysis)
    console.print(_breakdown(analysis) if console.width >= _NARROW else _breakdown_by_phase(analysis))
    _exchanges(console, analysis)
    if analysis.gpu is not None:
        print_gpu(console, analysis.gpu, top=top)
    if analysis.units:
        console.print(_units(analysis, top, wide=console.width >= _WIDE))
    _startup(console, analysis)
    if start is not None:
        _outside_steps(console, start)
    _path(console, analysis, top)
    _bound(console, analysis)
    for note in analysis.notes:
        _line(console, f"note: {note}")


def print_runs(
    console: Console, found: Mapping[str, Analysis], results: Results | None, folder: Path, *, notes: Sequence[str]
) -> None:
    """Print one row per run, each run's verdict, how the strategies scale, and what is missing."""
    phases = _seen(analysis.breakdown for analysis in found.values()) if console.width >= _WIDE else []
    rows = []
    for name, one in found.items():
        shares = [percent(one.breakdown[phase]) for phase in phases]
        rows.append([name, str(one.world_size), _ms(one.step_ms["usual"]), *shares, one.verdict.kind])
    heads = ["run", "ranks", "step ms", *(_SHORT[phase] for phase in phases), "verdict"]
    console.print(simple_table("runs", heads, rows))
    for name, analysis in found.items():
        _line(console, f"{name}: {_sentence(analysis.verdict)}")
    if results is not None:
        console.print()
        show(console, scaling(results))
    for note in notes:
        _line(console, f"note: {note}")
    _line(console, f"more on one of them: syncline trace analyze {folder} --run {next(iter(found))}")


def _head(analysis: Analysis) -> str:
    what = analysis.strategy or analysis.imported or "a trace"
    ranks = plural(analysis.world_size, "rank")
    step = analysis.step_ms
    steady = len(analysis.steps) - analysis.startup.steps
    long = steady - analysis.usual_steps
    longer = "1 steady one is longer" if long == 1 else f"{long} steady ones are longer"
    of = f"{analysis.usual_steps} usual ones; {longer}" if long else f"the {steady} steady ones"
    first, last = analysis.steps[0], analysis.steps[-1]
    steps = f"steps {first} to {last}" if last > first else f"step {first}"
    if steady == 1:
        return f"{what}, {ranks}, {steps}: {_ms(step['usual'])} ms (one steady step)"
    return (
        f"{what}, {ranks}, {steps}: {_ms(step['usual'])} ms per step (the mean of {of}; 95% below {_ms(step['p95'])})"
    )


def _verdict(console: Console, analysis: Analysis) -> None:
    console.print()
    console.print(Text.assemble("verdict: ", (analysis.verdict.kind, "bold")))
    _line(console, _sentence(analysis.verdict))
    for finding in analysis.findings[1 : 1 + _MORE_FINDINGS]:
        kind = "" if finding.kind == "unclear" else f" {finding.kind}"
        _line(console, f"also{kind}: {_sentence(finding)}")
    console.print()


def _sentence(finding: Finding) -> str:
    gain = "" if finding.recoverable_ms is None else f" Recoverable: {_ms(finding.recoverable_ms)} ms per step."
    return finding.sentence + gain


def _breakdown(analysis: Analysis) -> Table:
    phases = _seen([analysis.breakdown])
    rows = [
        [str(rank.rank), _ms(rank.step_ms["mean"]), *(_ms(rank.breakdown_ms[phase]) for phase in phases)]
        for rank in analysis.ranks[:_MOST_RANKS]
    ]
    if len(analysis.ranks) > _MOST_RANKS:
        rows.append([f"... {len(analysis.ranks) - _MOST_RANKS} more"])
    rows.append(["share", "", *(percent(analysis.breakdown[phase]) for phase in phases)])
    heads = ["idle" if phase == "other" and analysis.gpu is not None else _SHORT[phase] for phase in phases]
    return simple_table("ms per step, mean", ["rank", "step", *heads], rows)


def _breakdown_by_phase(analysis: Analysis) -> Table:
    """The breakdown for a narrow terminal: one row per phase, one column for each of the first ranks."""
    shown = analysis.ranks[:3]
    rows = [
        [_long(phase, analysis), *(_ms(rank.breakdown_ms[phase]) for rank in shown), percent(analysis.breakdown[phase])]
        for phase in _seen([analysis.breakdown])
    ]
    rows.append(["step", *(_ms(rank.step_ms["mean"]) for rank in shown), ""])
    return simple_table("ms per step, mean", ["", *(f"rank {rank.rank}" for rank in shown), "share"], rows)


def _seen(breakdowns: Iterable[Mapping[str, float]]) -> list[str]:
    """The phases that take any time; there is no room for the others."""
    rows = list(breakdowns)
    return [phase for phase in PHASES if any(row[phase] >= 0.0005 for row in rows)]


def _exchanges(console: Console, analysis: Analysis) -> None:
    wire = analysis.network
    if wire is None:
        _line(console, "exchanges: none")
        return
    count = significant(wire.messages)
    parts = [f"exchanges: {count} a step, {size(wire.bytes or None)}"]
    if analysis.waits_known:
        seen = analysis.breakdown_ms["wait"]
        parts.append(f"{_ms(wire.busy_ms)} ms of transfer")
        parts.append(f"{_ms(wire.wait_ms)} ms of waiting for late ranks ({_ms(seen)} ms visible)")
    else:
        both = _ms(wire.busy_ms + wire.wait_ms)
        parts.append(
            f"{both} ms of transfers and waits for late ranks, which this trace cannot separate (see the notes)"
        )
    if analysis.communication is not None:
        parts.append(f"{percent(analysis.communication)} of the transfers behind compute")
    if analysis.compression is not None:
        parts.append(f"{percent(analysis.compression)} of the compression behind compute")
    _line(console, ", ".join(parts))
    if wire.bits:
        how = {"fitted": "from messages of several sizes", "link": "the link's", "seen": "bytes over time"}
        _line(
            console,
            f"a message takes {wire.latency_ms:.2f} ms on the network, plus its bytes at {bandwidth(wire.bits)}"
            f" ({how.get(wire.known, 'assumed')})",
        )
    if not analysis.waits_known:
        console.print()
        return
    together = [analysis.straggler] if analysis.straggler and len(analysis.straggler.ranks) > 1 else []
    for late in (*together, *analysis.late[:4]):
        doing = f", in {_long(late.doing, analysis)}" if late.doing else ""
        _line(console, f"late: {late.name}, {percent(late.share)} of waits, {_ms(late.wait_ms)} ms per step{doing}")
    console.print()


def _units(analysis: Analysis, top: int, *, wide: bool) -> Table:
    units = analysis.units
    title = f"units by exposed time per step ({min(top, len(units))} of {len(units)}), ms from the step's start"
    columns: Columns = (
        ("unit", lambda unit: one_line(unit.unit or unit.name) + _times(unit.count)),
        ("size", lambda unit: size(unit.bytes or None)),
        ("launch", lambda unit: _ms(unit.launch_ms)),
        ("end", lambda unit: _ms(unit.end_ms)),
        ("moving", lambda unit: _ms(unit.transfer_ms)),
        ("exposed", lambda unit: _ms(unit.exposed_ms)),
        ("ready", lambda unit: _ms(unit.ready_ms)),
        ("wait", lambda unit: _ms(unit.wait_ms)),
        ("rate", lambda unit: bandwidth(unit.bandwidth_bits)),
    )
    return simple_table(title, *tabulate(columns if wide else columns[:-3], units[:top]))


def _times(count: float) -> str:
    """How often a unit is exchanged, if that is not once per step."""
    if 0.99 <= count <= 1.01:
        return ""
    return f" x{significant(count)}" if count > 1 else f" (1 in {significant(1 / count)} steps)"


def _startup(console: Console, analysis: Analysis) -> None:
    start = analysis.startup
    if start.extra_ms < _NEGLIGIBLE_START * start.steady_ms:
        _line(console, "start-up: none, the first step takes no longer than others")
        return
    reasons = ", ".join(f"{_long(phase, analysis)} {_ms(ms)}" for phase, ms in start.causes[:4])
    first = f"the first {start.steps} steps take" if start.steps > 1 else "the first step takes"
    _line(
        console,
        f"start-up: {first} {_ms(start.extra_ms)} ms more than steady ones ({_ms(start.first_step_ms)} ms for the"
        f" first, {_ms(start.steady_ms)} ms steady){': ' + reasons if reasons else ''}",
    )


def _outside_steps(console: Console, start: StartUp) -> None:
    before = [f"{name} {_ms(ms)} ms" for name, ms in start.parts if name != "first step"]
    if before:
        _line(console, f"before the first step: {', '.join(before)}")
    if start.later_epoch_s is not None:
        _line(console, f"epochs: {start.first_epoch_s:.1f} s the first, {start.later_epoch_s:.1f} s each later one")


def _path(console: Console, analysis: Analysis, top: int) -> None:
    """The longest parts of the critical path in the order of time; the short ones are summed up."""
    pieces, step = analysis.critical_path, analysis.critical_step
    least = 0.01 * sum(piece.ms for piece in pieces)
    longest = sorted((n for n, piece in enumerate(pieces) if piece.ms >= least), key=lambda n: -pieces[n].ms)[:top]
    named = [(pieces[place], f" {pieces[place].unit}".rstrip()) for place in sorted(longest)]
    shown = [f"rank {piece.rank} {_long(piece.lane, analysis)}{unit} {_ms(piece.ms)}" for piece, unit in named]
    short: dict[str, float] = {}
    for place in set(range(len(pieces))) - set(longest):
        piece = pieces[place]
        short[piece.lane] = short.get(piece.lane, 0.0) + piece.ms
    most = ", ".join(
        f"{_long(lane, analysis)} {_ms(ms)}" for lane, ms in sorted(short.items(), key=lambda item: -item[1])
    )
    more = f" (+ {plural(len(pieces) - len(longest), 'short piece')}: {most})" if short else ""
    _line(console, f"critical path of step {step}, ms: {' > '.join(shown)}{more}")


def _bound(console: Console, analysis: Analysis) -> None:
    bound = analysis.bound
    if bound.bound_ms is None or bound.distance is None:
        _line(console, "bound: not known, the trace holds no compute")
        return
    network = "not known" if bound.wire_ms is None else f"{_ms(bound.wire_ms)} ms"
    longer = f"{bound.distance:.0%} longer" if bound.distance < 1 else f"{1 + bound.distance:.1f} times as long"
    longer = "no longer" if bound.distance < _NO_LONGER else longer
    _line(
        console,
        f"bound: {_ms(bound.bound_ms)} ms = max(compute {_ms(bound.compute_ms or 0.0)} ms, network {network});"
        f" the step takes {longer}",
    )


def _line(console: Console, text: str) -> None:
    # Names from a trace may contain line breaks.
    console.print(Text(printable(text).replace("\n", " ")), soft_wrap=not console.is_terminal)


def _long(phase: str, analysis: Analysis) -> str:
    """A phase or lane in words. All kernels of a GPU are recorded: its other time is idle."""
    return "idle" if phase == "other" and analysis.gpu is not None else _LONG.get(phase, phase)


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
