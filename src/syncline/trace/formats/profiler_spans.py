"""Makes spans from the rows of a torch.profiler trace: kernels get the lane of their launch, collectives a number."""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from syncline.trace.formats.profiler_lanes import Interval, Thread, joined, thread_lanes, without
from syncline.trace.formats.trace_file import Step, step_at
from syncline.trace.span import STEP, Span

_JOIN = 5_000  # nanoseconds between two kernels of a busy stream; in a longer gap the GPU is idle


class Collective(NamedTuple):
    """A collective as it ran: a range of a communication thread, or a kernel."""

    start: int
    end: int
    name: str
    bytes: int
    correlation: int = -1


class Kernel(NamedTuple):
    """A kernel, or (`copied`) a copy of an input to the GPU."""

    start: int
    end: int
    correlation: int
    copied: bool


@dataclass
class Rows:
    """The kept events: `launches` of kernels by correlation id, `calls` of collectives by thread."""

    steps: list[tuple[Step, Thread]] = field(default_factory=list)
    host: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    kernels: list[Kernel] = field(default_factory=list)
    launches: dict[int, tuple[Thread, int]] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    calls: dict[Thread, list[Collective]] = field(default_factory=lambda: defaultdict(list))


def spans_of(rows: Rows, *, rank: int, base: int) -> tuple[list[Span], list[str]]:
    """The rank's spans, shifted by `base` nanoseconds, and notes about missing data."""
    notes: list[str] = []
    steps = _steps(rows, notes)
    if not steps:
        return [], ["it holds no work of a training loop: profile with ProfilerActivity.CPU, and CUDA on a GPU"]
    spans = [Span(rank, STEP, STEP, "", number, base + start, base + end) for number, start, end in steps]
    work = _work(rows, steps)
    spans += [Span(rank, p.kind, p.kind, "", p.step, base + p.start, base + p.end) for p in work if p.step >= 0]
    outside = sum(interval.step < 0 for interval in work)
    counted: dict[int, int] = defaultdict(int)
    for each in sorted(_collectives(rows, notes)):
        _, launched = rows.launches.get(each.correlation, (0, each.start))
        step = step_at(steps, launched, each.end)
        if step < 0:
            outside += 1
            continue
        unit = f"collective {counted[step]}"
        counted[step] += 1
        spans.append(Span(rank, "exchange", each.name, unit, step, base + each.start, base + each.end, each.bytes))
    if outside:
        notes.append(f"{outside} spans before its first or after its last step were left out")
    return spans, notes


def _steps(rows: Rows, notes: list[str]) -> list[Step]:
    steps = sorted({step[0]: step for step, _ in rows.steps}.values(), key=lambda step: step[1])
    if steps:
        return steps
    edges = [(interval.start, interval.end) for thread in rows.host.values() for interval in thread]
    edges += [(kernel.start, kernel.end) for kernel in rows.kernels]
    edges += [(each.start, each.end) for each in rows.collectives]
    if not edges:
        return []
    notes.append("it has no ProfilerStep ranges, so all of it is one step: call profiler.step() after every step")
    return [(0, min(start for start, _ in edges), max(end for _, end in edges))]


def _work(rows: Rows, steps: list[Step]) -> list[Interval]:
    """Data and compute: on a GPU the times of its kernels, otherwise those of the host."""
    main = rows.steps[0][1] if rows.steps else max(rows.host, key=lambda t: len(rows.host[t]), default=0)
    lanes = {t: thread_lanes(intervals, steps, training=t == main) for t, intervals in rows.host.items()}
    if rows.kernels:
        return [p for p in lanes.get(main, []) if p.kind == "data"] + _kernels(rows, lanes, steps)
    # The call of a collective is not compute: where it blocks, the exchange is exposed.
    return [
        interval
        for thread, intervals in lanes.items()
        for interval in without(intervals, [(call.start, call.end) for call in rows.calls.get(thread, [])])
    ]


def _kernels(rows: Rows, lanes: dict[Thread, list[Interval]], steps: list[Step]) -> list[Interval]:
    by_lane: dict[str, list[Interval]] = defaultdict(list)
    starts = {thread: [interval.start for interval in intervals] for thread, intervals in lanes.items()}
    for kernel in sorted(rows.kernels):
        thread, launched = rows.launches.get(kernel.correlation, (0, kernel.start))
        step = step_at(steps, launched, kernel.end)
        # Without an op around its launch (a kernel from Python) it gets the lane that its thread had before.
        place = bisect_right(starts.get(thread, []), launched) - 1
        before = lanes[thread][place] if place >= 0 else None
        lane = before.kind if before is not None and before.step == step else "forward"
        if kernel.copied and lane == "forward":
            lane = "data"
        by_lane[lane].append(Interval(kernel.start, kernel.end, lane, step))
    return [interval for intervals in by_lane.values() for interval in joined(intervals, _JOIN)]


def _collectives(rows: Rows, notes: list[str]) -> list[Collective]:
    found = rows.collectives
    if not found and any(rows.calls.values()):
        notes.append(
            "it has only the calls of its collectives, which may return before the transfer ends:"
            " profile with ProfilerActivity.CUDA, or use the gloo backend on the CPU"
        )
        found = [call for calls in rows.calls.values() for call in _not_nested(calls)]
    if not found:
        notes.append("it holds no collectives")
    elif not any(each.bytes for each in found):
        notes.append("it does not say how large its messages are: profile with record_shapes=True")
    return found


def _not_nested(calls: list[Collective]) -> list[Collective]:
    result: list[Collective] = []
    for call in sorted(calls, key=lambda c: (c.start, -c.end)):
        if not result or call.start >= result[-1].end:
            result.append(call)
    return result
