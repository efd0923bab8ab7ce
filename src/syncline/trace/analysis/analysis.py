"""The analysis of a trace: where a step's time goes on each rank, why, and how far that is from what is possible."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from syncline.errors import UsageError
from syncline.stats import mean_or_zero, median_mean_p95, winsorized_mean
from syncline.trace.analysis.breakdown import Breakdown, breakdowns, per_step
from syncline.trace.analysis.cpu_load import loads
from syncline.trace.analysis.critical_path import Piece, critical_path, typical
from syncline.trace.analysis.exchanges import Late, Meeting, late_ranks, meetings
from syncline.trace.analysis.findings import Facts, Finding
from syncline.trace.analysis.hiding import behind_data
from syncline.trace.analysis.late_rank_limits import waits_missing
from syncline.trace.analysis.limits import Bound, bound
from syncline.trace.analysis.network import Wire, wire
from syncline.trace.analysis.overlap import COMPUTE, overlap
from syncline.trace.analysis.startup import StartUp, start_up
from syncline.trace.analysis.steps import Prepared, prepare
from syncline.trace.analysis.units import UnitRow, unit_table
from syncline.trace.analysis.verdict import verdict
from syncline.trace.span import PHASES, STEP, Span

FORMAT = "syncline analysis 1"
_ROWS = 4000


@dataclass(frozen=True)
class Analysis:
    """What a trace tells. Figures are of the steady steps; those that it does not allow are None."""

    strategy: str | None
    world_size: int
    notes: tuple[str, ...]
    steps: tuple[int, ...]
    steady_first: int
    verdict: Finding
    findings: tuple[Finding, ...]
    communication: float | None
    """The share of transfers' time that compute hides."""
    compression: float | None
    step_ms: dict[str, float]
    ranks: tuple[Breakdown, ...]
    per_step: tuple[dict[str, Any], ...]
    wire: Wire | None
    late: tuple[Late, ...]
    units: tuple[UnitRow, ...]
    startup: StartUp
    critical_path: tuple[Piece, ...]
    critical_step: int
    bound: Bound
    queue_ms: float | None = None
    """Ms a step that the training thread of the rank that was waited for was ready to run and did not."""
    imported: str | None = None
    """What wrote the trace, where it was not Syncline."""

    @property
    def breakdown_ms(self) -> dict[str, float]:
        """Ms a step by phase, the mean over ranks."""
        return {phase: mean_or_zero([rank.breakdown_ms[phase] for rank in self.ranks]) for phase in PHASES}

    @property
    def breakdown(self) -> dict[str, float]:
        """Shares by phase, the mean over ranks; they sum to 1."""
        return {phase: mean_or_zero([rank.breakdown[phase] for rank in self.ranks]) for phase in PHASES}

    def as_json(self, source: str = "") -> dict[str, Any]:
        """Plain data, as `syncline trace analyze --json` prints it."""
        return {
            "format": FORMAT,
            "source": source,
            "strategy": self.strategy,
            "world_size": self.world_size,
            "notes": list(self.notes),
            "steps": {
                "first": self.steps[0],
                "last": self.steps[-1],
                "count": len(self.steps),
                "steady_first": self.steady_first,
            },
            "verdict": self.verdict.as_json(),
            "findings": [finding.as_json() for finding in self.findings],
            "overlap": {"communication": self.communication, "compression": self.compression},
            "step_ms": self.step_ms,
            "ranks": [rank.as_json() for rank in self.ranks],
            "breakdown": self.breakdown,
            "breakdown_ms": self.breakdown_ms,
            "per_step": list(self.per_step),
            "exchanges": self._exchanges(),
            "units": [unit.as_json() for unit in self.units],
            "startup": self.startup.as_json(),
            "critical_path": [piece.as_json() for piece in self.critical_path],
            "critical_step": self.critical_step,
            "queue_ms": self.queue_ms,
            "bound": self.bound.as_json(),
        }

    def _exchanges(self) -> dict[str, Any]:
        found = self.wire
        return {
            "count_per_step": found.messages if found else 0.0,
            "bytes_per_step": found.bytes if found else 0.0,
            "wait_ms": found.wait_ms if found else 0.0,
            "transfer_ms": found.busy_ms if found else 0.0,
            "latency_ms": found.latency_ms if found else None,
            "bandwidth_bits": found.bits if found else None,
            "cost_known": found.known if found else None,
            "late": [late.as_json() for late in self.late],
        }


def analyze(
    spans: Iterable[Span],
    *,
    metadata: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    steps: tuple[int, int] | None = None,
) -> Analysis:
    """Analyse the spans of all ranks, on one clock, waits split off; `steps` keeps those in [first, last)."""
    about = metadata or {}
    spans = list(spans)
    whole, cut = _whole(spans, about)
    asked = steps or (0, 1 << 62)
    trace = prepare(spans, steps=(max(whole, asked[0]), asked[1]) if steps or cut else None)
    if not trace.steps:
        which = f" from {steps[0]} to {steps[1] - 1}" if steps else ""
        raise UsageError(f"the trace holds no steps{which} that every rank has: record whole training steps")
    start = start_up(trace)
    steady = trace.steps[start.steps :]
    found = meetings(trace)
    link = about.get("bandwidth")
    speed = wire(trace, found, steady, link=float(link) if isinstance(link, int | float) and link > 0 else None)
    late = late_ranks(trace, found, steady)
    series = trace.series(steady)
    step_ms = median_mean_p95(series)
    limit = bound(trace, steady, speed, step_ms=step_ms["median"])
    facts = Facts(
        ranks=trace.ranks,
        steps=len(steady),
        all_steps=len(trace.steps),
        step_ms=winsorized_mean(series),
        whole_ms=sum(trace.series(trace.steps)),
        phases={phase: {rank: tuple(trace.phase(phase, rank, steady)) for rank in trace.ranks} for phase in PHASES},
        late=late,
        wire=speed,
        bound=limit,
        startup=start,
        loads=loads(about, trace.ranks, steady, awaited=[_awaited(trace, step) for step in steady]),
        on_gpu=about.get("backend") == "nccl",
        communication=_overlap(trace, steady, "exchange"),
        moving=_moving(found, set(steady)),
        behind_data=behind_data(trace, steady),
        waits_told=not waits_missing(about, len({span.rank for span in spans})),
    )
    chosen, findings = verdict(facts)
    rows, thinned = per_step(trace, most=_ROWS)
    step = typical(trace, steady)
    size, name = about.get("world_size"), about.get("strategy")
    return Analysis(
        strategy=name if isinstance(name, str) else None,
        world_size=size if type(size) is int else len(trace.ranks),
        notes=(*notes, *cut, *trace.notes, *_missing(trace), *thinned),
        steps=trace.steps,
        steady_first=start.first,
        verdict=chosen,
        findings=findings,
        communication=facts.communication,
        compression=_overlap(trace, steady, "encode"),
        step_ms=step_ms,
        ranks=breakdowns(trace, steady),
        per_step=rows,
        wire=speed,
        late=late,
        units=tuple(unit_table(trace, found, steady)),
        startup=start,
        critical_path=tuple(critical_path(trace, found, step)),
        critical_step=step,
        bound=limit,
        queue_ms=max((winsorized_mean(load.delay_ms) for load in facts.loads if load.delay_ms), default=None),
        imported=str(about["imported"]) if "imported" in about else None,
    )


def _moving(found: Sequence[Meeting], kept: set[int]) -> frozenset[int]:
    """The ranks of which transfers are known."""
    return frozenset(one.rank for meeting in found if meeting.step in kept for one in meeting.joined if one.moved)


def _awaited(trace: Prepared, step: int) -> int:
    """The rank that the others waited for: it has waited least itself."""
    return min(trace.ranks, key=lambda rank: trace.parts[rank][step]["wait"])


def _overlap(trace: Prepared, steps: Sequence[int], lane: str) -> float | None:
    """The mean over ranks, as far as each has any; decoding counts as compression.

    What runs between recorded steps counts where compute is seen to hide it: else nobody knows what ran there.
    """
    kept = set(steps)
    of = {"encode": ("encode", "decode")}.get(lane, (lane,))
    values = []
    for rank in trace.ranks:
        # Compute of any step may hide it, also the next one's.
        mine = [s for s in trace.spans[rank] if s.lane in COMPUTE or (s.lane in of and s.step in kept)]
        made = [replace(s, lane=lane) if s.lane in of and s.lane != lane else s for s in mine]
        values.append(overlap(made, of=lane, within=trace.known.get(rank, ())))
    known = [value for value in values if value is not None]
    return mean_or_zero(known) if known else None


def _whole(spans: Sequence[Span], about: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The first step of which no rank's recorder dropped a span, and a note where one did."""
    recorder = about.get("recorder")
    dropped = recorder.get("dropped") if isinstance(recorder, dict) else 0
    if not isinstance(dropped, int) or dropped <= 0:
        return 0, []
    first: dict[int, int] = {}
    for span in spans:
        if span.lane != STEP:
            first[span.rank] = min(span.step, first.get(span.rank, span.step))
    whole = max(first.values(), default=-1) + 1
    return whole, [f"the recorder was full and dropped {dropped:,} spans: steps before {whole} are left out"]


def _missing(trace: Prepared) -> list[str]:
    """What the trace does not hold, in sentences."""
    if trace.has_compute:
        return []
    return ["it holds no compute: overlap and the bound are not known, and every exchange counts as exposed"]


__all__ = ["FORMAT", "Analysis", "analyze"]
