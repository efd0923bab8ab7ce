"""The use of a GPU's time: compute, communication, copies and idle time, by what the host did meanwhile.

Counted as HTA (Holistic Trace Analysis) does: a kernel of a collective is communication from its start, copies are not
compute, gaps between kernels are idle, and the time is from the first kernel's start to the last one's end.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from syncline.trace.analysis.kernels import KernelRow, OperatorRow, is_kernel, kernel_tables
from syncline.trace.analysis.steps import Prepared
from syncline.trace.gpu_activity import (
    DATA_LOADING,
    HOST_WAIT,
    IDLE_KINDS,
    BlockedTime,
    GpuActivity,
    IdleTime,
    gpu_activities,
)
from syncline.trace.intervals import covered
from syncline.trace.span import Span, is_copy

_TOP = 50  # rows of each table


@dataclass(frozen=True)
class GpuTime:
    """One rank's GPU from its first kernel of the steps to its last, in ms per step."""

    rank: int
    whole_ms: float
    compute_ms: float
    communication_ms: float
    copies_ms: float
    idle_ms: float
    overlap: float | None
    """The share of communication behind compute, with waits for late ranks, as HTA counts it; None without any."""
    idle_by_kind: dict[str, float]
    """Host wait, kernel wait, other wait: between the kernels of all streams together."""
    streams: dict[str, dict[str, float]]
    """The same between the kernels of each stream, in ms of the whole trace, as HTA has it."""


@dataclass(frozen=True)
class HostRow:
    """What the host did, with ms and count per step, the mean over ranks."""

    doing: str
    ms: float
    count: float
    longest_ms: float = 0.0


@dataclass(frozen=True)
class GpuUse:
    """The GPUs of all ranks: times by rank, and tables over all ranks."""

    ranks: tuple[GpuTime, ...]
    gaps: tuple[HostRow, ...]
    """Idle time because the host launched too late, by what it did."""
    blocked: tuple[HostRow, ...]
    """Time in which the host waited for the GPU, by call."""
    kernels: tuple[KernelRow, ...]
    operators: tuple[OperatorRow, ...]
    classes: dict[str, float]
    """Ms per step by class of kernel; kernels that run at once count each."""
    host_series: dict[int, tuple[float, ...]]
    """By rank: ms of each step in which the GPU waits for the host, without data loading and `sync_series`."""
    sync_series: dict[int, tuple[float, ...]]
    """By rank: ms of each step in which the GPU waits for the host because the host had waited for the GPU."""
    other_series: dict[int, tuple[float, ...]]
    """By rank: ms of each step in which the GPU is idle for any other reason."""

    def as_json(self) -> dict[str, Any]:
        """Plain data; the tables have their first rows."""
        return {
            "ranks": [asdict(rank) for rank in self.ranks],
            "gaps": [asdict(row) for row in self.gaps[:_TOP]],
            "blocked": [asdict(row) for row in self.blocked[:_TOP]],
            "kernels": [asdict(row) for row in self.kernels[:_TOP]],
            "operators": [asdict(row) for row in self.operators[:_TOP]],
            "classes": self.classes,
        }


def gpu_use(trace: Prepared, steps: Sequence[int], metadata: Mapping[str, Any]) -> GpuUse | None:
    """The use of the GPUs in these steps; None if the trace shows no kernels."""
    found = {rank: one for rank, one in gpu_activities(metadata.get("gpu")).items() if rank in trace.ranks}
    if not found:
        return None
    host, sync, other = {}, {}, {}
    for rank in trace.ranks:
        activity = found.get(rank, GpuActivity())
        pairs = [_waits(activity, trace, rank, step) for step in steps]
        host[rank], sync[rank] = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
        idle_ms = trace.phase("other", rank, steps)
        other[rank] = tuple(max(0.0, ms - sum(pair)) for ms, pair in zip(idle_ms, pairs, strict=True))
    kept = set(steps)
    idle = [row for one in found.values() for row in one.idle if row.step in kept and row.kind == HOST_WAIT]
    blocked = [row for one in found.values() for row in one.blocked if row.step in kept]
    kernels, operators, classes = kernel_tables(trace, steps)
    return GpuUse(
        ranks=tuple(_time(trace, rank, steps, activity) for rank, activity in sorted(found.items())),
        gaps=_by_host(idle, len(steps) * len(found)),
        blocked=_by_host(blocked, len(steps) * len(found)),
        kernels=kernels,
        operators=operators,
        classes=classes,
        host_series=host,
        sync_series=sync,
        other_series=other,
    )


def _waits(activity: GpuActivity, trace: Prepared, rank: int, step: int) -> tuple[float, float]:
    """Ms of a step that the GPU waits for the host: because the host is slow, and because it had waited itself.

    Without its waits the host would be earlier by as much, but the GPU needs its busy time all the same.
    """
    late = sum(r.ns for r in activity.idle if r.step == step and r.kind == HOST_WAIT and r.doing != DATA_LOADING)
    late = min(late, trace.parts[rank][step]["other"])
    waited = min(late, sum(row.ns for row in activity.blocked if row.step == step))
    return (late - waited) / 1e6, waited / 1e6


def _time(trace: Prepared, rank: int, steps: Sequence[int], activity: GpuActivity) -> GpuTime:
    kept = set(steps)
    spans = [s for s in trace.spans[rank] if s.step in kept and s.stream]
    compute = [(s.start, s.end) for s in spans if is_kernel(s) and not is_copy(s)]
    copies = [(s.start, s.end) for s in spans if is_kernel(s) and is_copy(s)]
    communication = [(s.start, s.end) for s in spans if s.lane in ("exchange", "wait")]
    work = [*compute, *copies, *communication]
    whole = sum(_length(spans, run) for run in _runs(trace.steps, kept))
    both = covered(compute) + covered(communication) - covered([*compute, *communication])
    each = 1e6 * max(1, len(steps))
    by_kind = dict.fromkeys(IDLE_KINDS, 0)
    for row in activity.idle:
        if row.step in kept and row.kind in by_kind:
            by_kind[row.kind] += row.ns
    return GpuTime(
        rank=rank,
        whole_ms=whole / each,
        compute_ms=covered(compute) / each,
        communication_ms=covered(communication) / each,
        copies_ms=covered(copies) / each,
        idle_ms=(whole - covered(work)) / each,
        overlap=both / covered(communication) if communication and covered(communication) else None,
        idle_by_kind={kind: ns / each for kind, ns in by_kind.items()},
        streams={name: {kind: ns / 1e6 for kind, ns in of.items()} for name, of in activity.streams.items()},
    )


def _runs(steps: Sequence[int], kept: set[int]) -> list[set[int]]:
    """The kept steps in runs without a step between that was left out: its time is not idle time of the others."""
    return [set(run) for is_kept, run in groupby(steps, key=kept.__contains__) if is_kept]


def _length(spans: Sequence[Span], steps: set[int]) -> int:
    """Nanoseconds from the start of the first span of these steps to the end of the last."""
    mine = [span for span in spans if span.step in steps]
    return max((s.end for s in mine), default=0) - min((s.start for s in mine), default=0)


def _by_host(rows: Sequence[IdleTime] | Sequence[BlockedTime], steps: int) -> tuple[HostRow, ...]:
    """The rows by what the host did, the longest time first."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        total = found[row.doing]
        total[0] += row.ns
        total[1] += row.count
        total[2] = max(total[2], row.longest_ns if isinstance(row, IdleTime) else 0)
    table = [HostRow(name, ns / 1e6 / steps, count / steps, most / 1e6) for name, (ns, count, most) in found.items()]
    return tuple(sorted(table, key=lambda row: -row.ms))
