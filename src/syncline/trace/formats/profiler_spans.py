"""Makes spans from the events of a torch.profiler trace.

Ranges and ops of threads get a lane and a step, kernels the lane of their launch, collectives a number in their step.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from syncline.trace.formats.trace_file import Step, step_at
from syncline.trace.span import STEP, Span

_JOIN_OPS = 500_000  # nanoseconds: ops of a lane that are closer, with only Python between, are one span
_JOIN_KERNELS = 5_000  # nanoseconds between two kernels of a busy stream; in a longer gap the GPU is idle

Thread = int | str
"""A thread's name in a trace."""


class Interval(NamedTuple):
    """An interval of work of a thread, a kernel, or a collective.

    `kind` is a lane. Before `_thread_lanes` it can also be `op` (an op of any lane) or `finish` (DDP's copies after the
    backward pass). A kernel's kind is `kernel`, or `copy` (of an input to the GPU); a collective's is its name.
    """

    start: int
    end: int
    kind: str
    step: int = -1
    bytes: int = 0
    correlation: int = -1


@dataclass
class Rows:
    """The kept events: `launches` of kernels by correlation id, `calls` of collectives by thread."""

    steps: list[tuple[Step, Thread]] = field(default_factory=list)
    host: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    kernels: list[Interval] = field(default_factory=list)
    launches: dict[int, tuple[Thread, int]] = field(default_factory=dict)
    collectives: list[Interval] = field(default_factory=list)
    calls: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))


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
        spans.append(Span(rank, "exchange", each.kind, unit, step, base + each.start, base + each.end, each.bytes))
    if outside:
        notes.append(f"{outside} spans before its first or after its last step were left out")
    return spans, notes


def _steps(rows: Rows, notes: list[str]) -> list[Step]:
    steps = sorted({step[0]: step for step, _ in rows.steps}.values(), key=lambda step: step[1])
    if steps:
        return steps
    events = [*chain.from_iterable(rows.host.values()), *rows.kernels, *rows.collectives]
    if not events:
        return []
    notes.append("it has no ProfilerStep ranges, so all of it is one step: call profiler.step() after every step")
    return [(0, min(event.start for event in events), max(event.end for event in events))]


def _work(rows: Rows, steps: list[Step]) -> list[Interval]:
    """Data and compute: on a GPU the times of its kernels, otherwise those of the host."""
    main = rows.steps[0][1] if rows.steps else max(rows.host, key=lambda t: len(rows.host[t]), default=0)
    lanes = {t: _thread_lanes(intervals, steps, training=t == main) for t, intervals in rows.host.items()}
    if rows.kernels:
        return [p for p in lanes.get(main, []) if p.kind == "data"] + _kernels(rows, lanes, steps)
    # The call of a collective is not compute: where it blocks, the exchange is exposed.
    return [
        interval
        for thread, intervals in lanes.items()
        for interval in _without(intervals, _outermost(rows.calls.get(thread, [])))
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
        if kernel.kind == "copy" and lane == "forward":
            lane = "data"
        by_lane[lane].append(Interval(kernel.start, kernel.end, lane, step))
    return [interval for intervals in by_lane.values() for interval in _joined(intervals, _JOIN_KERNELS)]


def _collectives(rows: Rows, notes: list[str]) -> list[Interval]:
    found = rows.collectives
    if not found and any(rows.calls.values()):
        notes.append(
            "it has only the calls of its collectives, which may return before the transfer ends:"
            " profile with ProfilerActivity.CUDA, or use the gloo backend on the CPU"
        )
        found = [call for calls in rows.calls.values() for call in _outermost(calls)]
    if not found:
        notes.append("it holds no collectives")
    elif not any(each.bytes for each in found):
        notes.append("it does not say how large its messages are: profile with record_shapes=True")
    return found


def _thread_lanes(intervals: Iterable[Interval], steps: list[Step], *, training: bool) -> list[Interval]:
    """A thread's lanes, in order. Of a thread that does not run the training loop, only backward work counts."""
    outermost = [
        interval._replace(step=step_at(steps, interval.start, interval.end)) for interval in _outermost(intervals)
    ]
    if training:
        return _joined(_placed(outermost), _JOIN_OPS)
    own = ("backward", "finish")
    return _joined([interval._replace(kind="backward") for interval in outermost if interval.kind in own], _JOIN_OPS)


def _joined(intervals: Iterable[Interval], gap: int) -> list[Interval]:
    """Join neighbours of one lane and step that are at most `gap` apart; `intervals` are sorted by start."""
    result: list[Interval] = []
    for interval in intervals:
        before = result[-1] if result else None
        same = before is not None and (before.kind, before.step) == (interval.kind, interval.step)
        if before is not None and same and interval.start - before.end <= gap:
            result[-1] = before._replace(end=max(before.end, interval.end))
        else:
            result.append(interval)
    return result


def _without(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """The intervals of one thread with the holes removed; holes do not overlap."""
    result: list[Interval] = []
    ends = [hole.end for hole in holes]
    for interval in intervals:
        at = interval.start
        for hole in islice(holes, bisect_right(ends, interval.start), None):
            if hole.start >= interval.end:
                break
            if hole.start > at:
                result.append(interval._replace(start=at, end=hole.start))
            at = hole.end
        if at < interval.end:
            result.append(interval._replace(start=at))
    return result


def _outermost(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals without those that lie inside others, in order; where two overlap, the later one is cut."""
    result: list[Interval] = []
    for interval in sorted(intervals, key=lambda p: (p.start, -p.end)):
        at = result[-1].end if result else interval.start
        if interval.end > at:
            result.append(interval._replace(start=max(interval.start, at)))
    return result


def _placed(intervals: list[Interval]) -> list[Interval]:
    """Assign a lane to ops outside any range, from the work around them in their step.

    Ops before the last backward work are forward (such as the loss), ops before DDP copies its buckets back are
    backward, and later ones are part of the update (such as clipping).
    """
    last = {interval.step: interval.start for interval in intervals if interval.kind == "backward"}
    result: list[Interval] = []
    following = Interval(0, 0, "")
    for interval in reversed(intervals):
        if interval.kind != "op":
            following = interval
            lane = "backward" if interval.kind == "finish" else interval.kind
        elif following.kind == "finish" and following.step == interval.step:
            lane = "backward"
        else:
            lane = "update" if interval.start > last.get(interval.step, interval.start) else "forward"
        result.append(interval._replace(kind=lane))
    return result[::-1]
