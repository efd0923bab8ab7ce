"""The analysis of a trace: step time by phase and rank, causes of slowness, distance from the lower bound."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.stats import mean_or_zero, median_mean_p95
from syncline.trace.analysis.between_steps import KNOWN, LongSteps, known_work, long_steps
from syncline.trace.analysis.breakdown import Bound, Breakdown, bound, breakdowns, per_step
from syncline.trace.analysis.cpu_load import host_loads
from syncline.trace.analysis.critical_path import PathSegment, critical_path, typical_step
from syncline.trace.analysis.findings import Facts, Finding
from syncline.trace.analysis.gpu_use import GpuUse, gpu_use
from syncline.trace.analysis.late_ranks import LateRanks, late_ranks, pipeline_waits, waits_for_transfers
from syncline.trace.analysis.network import NetworkUse, network_use
from syncline.trace.analysis.overlap import hidden_by, hidden_share
from syncline.trace.analysis.startup import StartUp, start_up
from syncline.trace.analysis.steps import Prepared, prepare, usual_places
from syncline.trace.analysis.units import UnitRow, unit_table
from syncline.trace.analysis.verdict import verdict
from syncline.trace.formats.load import load
from syncline.trace.intervals import covered
from syncline.trace.merge.merge_ranks import Trace
from syncline.trace.span import ISSUING, PHASES, STEP, is_copy
from syncline.wording import plural

FORMAT = "syncline analysis 1"
_ROWS = 4000
_NO_COMPUTE = "it holds no compute: overlap and the bound are not known, and every exchange counts as exposed"


@dataclass(frozen=True)
class Analysis:
    """All results. Figures are means over the usual steps, if nothing else is said.

    Usual steps are the steady ones without those that are much longer. Figures that the trace does not show are None.
    """

    strategy: str | None
    world_size: int
    notes: tuple[str, ...]
    steps: tuple[int, ...]
    steady_first: int
    verdict: Finding
    findings: tuple[Finding, ...]
    communication: float | None
    """The share of the transfers' time that compute hides."""
    compression: float | None
    step_ms: dict[str, float]
    """`usual`: the mean of the usual steps, which other figures refer to. Median, mean and p95: of all steady ones."""
    usual_steps: int
    ranks: tuple[Breakdown, ...]
    per_step: tuple[dict[str, Any], ...]
    network: NetworkUse | None
    late: tuple[LateRanks, ...]
    straggler: LateRanks | None
    """The ranks that most waits are for, one or several together."""
    long: LongSteps | None
    """The steady steps that are not usual."""
    units: tuple[UnitRow, ...]
    startup: StartUp
    critical_path: tuple[PathSegment, ...]
    critical_step: int
    bound: Bound
    waits_known: bool = True
    """Whether waits for late ranks can be separated from transfers; if not, a note says why."""
    queue_ms: float | None = None
    """Ms per step that the training thread of the rank that was waited for was ready to run but had no core."""
    gpu: GpuUse | None = None
    """How the GPUs are used; None if the trace shows no kernels."""
    imported: str | None = None
    """The tool that wrote the trace, if it was not Syncline."""

    @property
    def breakdown_ms(self) -> dict[str, float]:
        """Ms per step by phase, the mean over ranks."""
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
                "usual": self.usual_steps,
            },
            "verdict": self.verdict.as_json(),
            "findings": [finding.as_json() for finding in self.findings],
            "overlap": {"communication": self.communication, "compression": self.compression},
            "step_ms": self.step_ms,
            "ranks": [asdict(rank) for rank in self.ranks],
            "breakdown": self.breakdown,
            "breakdown_ms": self.breakdown_ms,
            "per_step": list(self.per_step),
            "exchanges": self._exchanges(),
            "units": [asdict(unit) for unit in self.units],
            "long_steps": self.long.as_json() if self.long else None,
            "startup": self.startup.as_json(),
            "critical_path": [asdict(segment) for segment in self.critical_path],
            "critical_step": self.critical_step,
            "queue_ms": self.queue_ms,
            "bound": asdict(self.bound),
            "gpu": None if self.gpu is None else self.gpu.as_json(),
        }

    def _exchanges(self) -> dict[str, Any]:
        found = self.network
        return {
            "count_per_step": found.messages if found else 0.0,
            "bytes_per_step": found.bytes if found else 0.0,
            "wait_ms": found.wait_ms if found else 0.0,
            "waits_known": self.waits_known,
            "transfer_ms": found.busy_ms if found else 0.0,
            "latency_ms": found.latency_ms if found else None,
            "bandwidth_bits": found.bits if found else None,
            "cost_known": found.known if found else None,
            "late": [late.as_json() for late in self.late],
            "straggler": self.straggler.as_json() if self.straggler else None,
        }


def analyze(trace: Trace | str | Path, *, steps: tuple[int, int] | None = None) -> Analysis:
    """Analyse a trace, or the file or run folder of one; `steps` keeps the steps in [first, last)."""
    if not isinstance(trace, Trace):
        trace = load(trace)
    about = trace.metadata
    whole_from, dropped = _whole_from(trace)
    asked = steps or (0, 1 << 62)
    prepared = prepare(trace, steps=(max(whole_from, asked[0]), asked[1]) if steps or dropped else None)
    if not prepared.steps:
        which = f" from {steps[0]} to {steps[1] - 1}" if steps else ""
        raise UsageError(f"the trace holds no steps{which} that every rank has: record whole training steps")
    start = start_up(prepared)
    whole = prepared.steps[start.steps :]
    steady = tuple(whole[place] for place in usual_places(prepared.series(whole)))
    step_ms = {"usual": mean_or_zero(prepared.series(steady)), **median_mean_p95(prepared.series(whole))}
    network = network_use(prepared, steady, link=_link(about))
    limit = bound(prepared, steady, network, step_ms=step_ms["usual"])
    late, straggler, delayed = late_ranks(prepared, steady, hosts=_host_names(about, prepared.ranks))
    known = known_work(prepared, steady)
    phases = {phase: {rank: tuple(prepared.phase(phase, rank, steady)) for rank in prepared.ranks} for phase in PHASES}
    # The rank that the others waited for waited least itself.
    awaited = [min(prepared.ranks, key=lambda rank: prepared.parts[rank][step]["wait"]) for step in steady]
    kept = set(steady)
    members = [member for exchange in prepared.exchanges if exchange.step in kept for member in exchange.members]
    facts = Facts(
        ranks=prepared.ranks,
        steps=len(steady),
        all_steps=len(prepared.steps),
        step_ms=step_ms["usual"],
        whole_ms=sum(prepared.series(prepared.steps)),
        phases=phases,
        late=late,
        straggler=straggler,
        issuing_ms=_issuing_ms(prepared, kept),
        transfer_waits=tuple(waits_for_transfers(prepared, steady)) if prepared.has_compute else (),
        delayed_transfers=delayed,
        pipeline_waits=tuple(pipeline_waits(prepared, steady)),
        network=network,
        bound=limit,
        startup=start,
        loads=host_loads(about, prepared.ranks, steady, awaited=awaited),
        on_gpu=trace.on_gpu,
        communication=hidden_share(prepared, steady, "exchange"),
        transferring=frozenset(member.rank for member in members if member.transfer is not None),
        hidden_by={lane: hidden_by(lane, prepared, steady) for lane in ("data", "between")},
        loader_timed=any(s.lane == "data" and not is_copy(s) for mine in prepared.spans.values() for s in mine),
        known_between={name: ms for name, ms in known.items() if KNOWN[name] == "between"},
        long=long_steps(prepared, steady, sorted(set(whole) - set(steady))),
        waits_known=trace.waits_unknown is None,
        gpu=gpu_use(prepared, steady, about),
    )
    chosen, findings = verdict(facts)
    rows, thinned = per_step(prepared, most=_ROWS)
    step = typical_step(prepared, steady)
    size, name = about.get("world_size"), about.get("strategy")
    return Analysis(
        strategy=name if isinstance(name, str) else None,
        world_size=size if type(size) is int else len(prepared.ranks),
        notes=(*trace.notes, *dropped, *prepared.notes, *([] if prepared.has_compute else [_NO_COMPUTE]), *thinned),
        steps=prepared.steps,
        steady_first=start.first,
        verdict=chosen,
        findings=findings,
        communication=facts.communication,
        compression=hidden_share(prepared, steady, "encode"),
        step_ms=step_ms,
        usual_steps=len(steady),
        ranks=breakdowns(prepared, steady),
        per_step=rows,
        network=network,
        waits_known=facts.waits_known,
        late=facts.late,
        straggler=straggler,
        long=facts.long,
        units=tuple(unit_table(prepared, steady)),
        startup=start,
        critical_path=tuple(critical_path(prepared, step)),
        critical_step=step,
        bound=limit,
        queue_ms=max((mean_or_zero(host.delay_ms) for host in facts.loads if host.delay_ms), default=None),
        gpu=facts.gpu,
        imported=str(about["imported"]) if "imported" in about else None,
    )


def _issuing_ms(trace: Prepared, kept: set[int]) -> float:
    """Ms per step and rank in which the training threads packed, started or unpacked messages."""
    names = ("wait", ISSUING)
    found = [[s for s in trace.spans[rank] if s.step in kept and (s.lane, s.name) == names] for rank in trace.ranks]
    total = sum(covered((s.start, s.end) for s in mine) for mine in found)
    return total / 1e6 / max(1, len(kept) * len(trace.ranks))


def _link(about: Mapping[str, Any]) -> float | None:
    """The bits per second of a rank's link, if the trace says so."""
    link = about.get("bandwidth")
    return float(link) if isinstance(link, int | float) and link > 0 else None


def _host_names(about: Mapping[str, Any], ranks: Sequence[int]) -> dict[int, str]:
    """By rank: the name of its host; empty if there is only one, or if the trace does not say."""
    named = about.get("nodes")
    names = {rank: str(named[str(rank)]) for rank in ranks if str(rank) in named} if isinstance(named, dict) else {}
    return names if len(set(names.values())) > 1 else {}


def _whole_from(trace: Trace) -> tuple[int, list[str]]:
    """The first step of which no rank's recorder dropped a span, with a note if one did."""
    recorder = trace.metadata.get("recorder")
    dropped = recorder.get("dropped") if isinstance(recorder, dict) else 0
    if not isinstance(dropped, int) or dropped <= 0:
        return 0, []
    first: dict[int, int] = {}
    for span in trace.spans:
        if span.lane != STEP:
            first[span.rank] = min(span.step, first.get(span.rank, span.step))
    whole = max(first.values(), default=-1) + 1
    return whole, [f"the recorder was full and dropped {plural(dropped, 'span')}: steps before {whole} are left out"]
