"""Makes spans from the events of a torch.profiler trace.

Ranges and ops of threads get a lane and a step, kernels the lane of their launch, collectives a number in their step.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import Any

from syncline.trace.formats.profiler_idle import gpu_activity
from syncline.trace.formats.profiler_messages import claim_kernels, with_calls
from syncline.trace.formats.profiler_rows import BEFORE, Interval, Rows, Thread, outermost
from syncline.trace.formats.repeated_steps import Event, repeated_steps
from syncline.trace.formats.trace_file import Step, step_at
from syncline.trace.gpu_activity import GpuActivity
from syncline.trace.span import STEP, Span
from syncline.wording import plural

_WAITED = 100_000  # nanoseconds without an op until a collective ends: less is the Python between two ops
_JOIN_OPS = 500_000  # nanoseconds: ops of a lane that are closer, with only Python between, are one span


@dataclass(frozen=True)
class Found:
    """One rank's spans, notes about missing data, and what its GPU waited for (None without a GPU).

    Without a GPU, `operators` are rows of step, operator and nanoseconds.
    """

    spans: list[Span] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gpu: GpuActivity | None = None
    sequences: dict[tuple[int, int, str], int] = field(default_factory=dict)
    """As in `RankTrace`."""
    operators: list[list[Any]] = field(default_factory=list)


def spans_of(rows: Rows, *, rank: int, base: int) -> Found:
    """The rank's spans, shifted by `base` nanoseconds."""
    notes: list[str] = []
    claim_kernels(rows)
    rows.mark_earlier_launches()
    steps = _steps(rows, notes)
    if not steps:
        return Found(
            notes=["it holds no work of a training loop: profile with ProfilerActivity.CPU, and CUDA on a GPU"]
        )
    lanes = _lanes(rows, steps)
    work = _work(rows, lanes, steps)
    collectives = [
        each._replace(step=step_at(steps, rows.launched(each))) for each in sorted(_collectives(rows, notes))
    ]
    device_steps = _device_steps(steps, [*rows.kernels, *collectives], rows) if rows.kernels else steps
    spans = [Span(rank, STEP, STEP, "", number, base + start, base + end) for number, start, end in device_steps]
    spans += [
        Span(rank, p.kind, p.name or p.kind, p.operator, p.step, base + p.start, base + p.end, stream=p.stream)
        for p in work
        if p.step >= 0
    ]
    counted: dict[tuple[int, str], int] = defaultdict(int)
    sequences: dict[tuple[int, int, str], int] = {}
    for each in collectives:
        if each.step < 0:
            continue
        unit = f"collective {counted[each.step, each.group]}" + (f" of group {each.group}" if each.group else "")
        counted[each.step, each.group] += 1
        times = (base + each.start, base + each.end)
        if each.sequence >= 0:
            sequences[*times, each.group] = each.sequence
        spans.append(Span(rank, "exchange", each.kind, unit, each.step, *times, each.bytes, each.group, each.stream))
    outside = sum(interval.step < 0 for interval in (*work, *collectives))
    if outside:
        notes.append(f"{plural(outside, 'span')} before its first or after its last step: left out")
    gpu = gpu_activity(rows, lanes, steps) if rows.kernels else None
    return Found(spans, notes, gpu, sequences, [] if rows.kernels else _host_operators(rows, steps))


def _device_steps(steps: list[Step], work: Iterable[Interval], rows: Rows) -> list[Step]:
    """The steps on the GPU's clock: each ends when the last kernel that was launched in it ends.

    The first one starts when the kernels that were launched before it have ended. A step that launched no kernel ends
    where the host ends it.
    """
    begin, ends = steps[0][1], dict[int, int]()
    for each in work:
        launched = rows.launched(each)
        step = step_at(steps, launched)
        if step >= 0:
            ends[step] = max(each.end, ends.get(step, each.end))
        elif launched < steps[0][1]:
            begin = max(begin, each.end)
    result = []
    for number, _, end in steps:
        until = max(begin, ends.get(number, end))
        result.append((number, begin, until))
        begin = until
    return result


def _steps(rows: Rows, notes: list[str]) -> list[Step]:
    steps = sorted({step[0]: step for step, _ in rows.steps}.values(), key=lambda step: step[1])
    launches = sum(kernel.correlation in rows.launches for kernel in rows.kernels)
    if steps and 2 * launches >= len(rows.kernels):
        return _accumulated(steps, rows, notes)
    if steps:
        # A GPU is behind its host: kernels run in another step than the one that launched them.
        notes.append("it does not show which calls launched its kernels: profile with ProfilerActivity.CPU as well")
        on_gpu = _repeated_kernels(rows)
        return [(number, start, end) for number, (start, end) in enumerate(on_gpu)] or steps
    events = [*chain.from_iterable(rows.host.values()), *rows.kernels, *rows.collectives]
    if not events:
        return []
    if found := _repeated(rows):
        notes.append(f"it has no ProfilerStep ranges: {len(found)} steps were found by the work that repeats")
        return [(number, start, end) for number, (start, end) in enumerate(found)]
    notes.append("it has no ProfilerStep ranges, so all of it is one step: call profiler.step() after every step")
    launched = [rows.launched(one) for one in (*rows.kernels, *rows.collectives)]
    begin = min([*(event.start for event in events), *(time for time in launched if time > BEFORE)])
    return [(0, begin, max(event.end for event in events))]


def _accumulated(steps: list[Step], rows: Rows, notes: list[str]) -> list[Step]:
    """The steps, or where the optimizer runs in every n-th only (gradients are accumulated), n of them as one."""
    numbers = {number: place for place, (number, _, _) in enumerate(steps)}
    ranges = chain.from_iterable(rows.optimizer.values())
    updated = sorted({numbers[step] for one in ranges if (step := step_at(steps, one.start)) in numbers})
    every = {after - before for before, after in pairwise(updated)}
    if len(every) != 1 or every == {1}:
        return steps
    (count,) = every
    notes.append(f"the optimizer runs in every {count}. ProfilerStep: {count} of them, with one update, are one step")
    ends = [place for place in updated if place >= count - 1]
    return [(steps[end][0] // count, steps[end - count + 1][1], steps[end][2]) for end in ends]


def _repeated(rows: Rows) -> list[tuple[int, int]]:
    """Steps by what the training thread repeats, or else the GPU."""
    main = _main_thread(rows)
    on_host = outermost([*rows.ops.get(main, ()), *rows.optimizer.get(main, ())])
    if steps := repeated_steps([Event(one.start, one.end, one.kind) for one in on_host]):
        return steps
    return _by_launch(_repeated_kernels(rows), rows)


def _repeated_kernels(rows: Rows) -> list[tuple[int, int]]:
    """Steps by the kernels that repeat, on the GPU's clock."""
    kernels = outermost(kernel._replace(kind=kernel.name) for kernel in rows.kernels)
    return repeated_steps([Event(one.start, one.end, one.kind) for one in kernels])


def _by_launch(steps: list[tuple[int, int]], rows: Rows) -> list[tuple[int, int]]:
    """Steps that were found by their kernels, from the launch of the first one: work counts where it was launched."""
    order = sorted((one.start, rows.launched(one)) for one in rows.kernels if rows.launched(one) > BEFORE)

    def launch(time: int) -> int:
        place = bisect_left(order, (time, 0))
        return order[place][1] if place < len(order) else time

    return [(launch(start), launch(end)) for start, end in steps]


def _host_operators(rows: Rows, steps: list[Step]) -> list[list[Any]]:
    """Rows of step, operator and nanoseconds of the host."""
    found: dict[tuple[int, str], int] = defaultdict(int)
    for ops in rows.ops.values():
        for op in outermost(ops):
            found[step_at(steps, op.start), op.kind] += op.end - op.start
    return [[step, name, ns] for (step, name), ns in found.items() if step >= 0]


def _lanes(rows: Rows, steps: list[Step]) -> dict[Thread, list[Interval]]:
    main = _main_thread(rows)
    return {t: _thread_lanes(intervals, steps, training=t == main) for t, intervals in rows.host.items()}


def _main_thread(rows: Rows) -> Thread:
    """The thread of the loop: that of the steps, or else that of the optimizer, or with the most forward work."""
    if rows.steps:
        return rows.steps[0][1]
    own = {t: sum(p.kind not in ("backward", "finish") for p in mine) for t, mine in rows.host.items()}
    return max(own, key=lambda t: (len(rows.optimizer.get(t, ())), own[t]), default=0)


def _work(rows: Rows, lanes: Mapping[Thread, list[Interval]], steps: list[Step]) -> list[Interval]:
    """Data and compute: on a GPU the times of its kernels, otherwise those of the host."""
    if rows.kernels:
        loading = [p for p in lanes.get(_main_thread(rows), []) if p.kind == "data"]
        return loading + _kernels(rows, lanes, steps)
    # The call of a collective is not compute, nor is waiting for one: there the exchange is exposed.
    ends = sorted((each.end, each.start) for each in rows.collectives)
    return [
        interval
        for thread, intervals in lanes.items()
        for interval in _without(intervals, outermost([*rows.calls.get(thread, []), *_blocked(rows, thread, ends)]))
    ]


def _blocked(rows: Rows, thread: Thread, ends: list[tuple[int, int]]) -> Iterator[Interval]:
    """Times in which a thread that calls collectives ran no op until one of them ended: it was waiting for that.

    Collectives that have a range of their own (Gloo) are waited for in C++, without an op: DDP's broadcast of buffers
    inside forward, for example. `ends`: end and start of all collectives, in order.
    """
    if not rows.calls.get(thread):
        return
    for before, after in pairwise(outermost(rows.ops.get(thread, []))):
        place = bisect_right(ends, after.start, key=lambda pair: pair[0]) - 1
        if place >= 0:
            end, start = ends[place]
            # Gloo's own thread starts the range a little after the call.
            under_way = start <= before.end or before.kind.startswith("c10d::")
            if under_way and end - before.end >= _WAITED:
                yield Interval(before.end, end, "wait")


def _kernels(rows: Rows, lanes: Mapping[Thread, list[Interval]], steps: list[Step]) -> list[Interval]:
    """Each kernel and copy with the lane, the step and the operator of its launch."""
    ops = {thread: outermost(mine) for thread, mine in rows.ops.items()}
    result = []
    for kernel in sorted(rows.kernels):
        launch = rows.launches.get(kernel.correlation)
        thread, launched = 0 if launch is None else launch.thread, rows.launched(kernel)
        step = step_at(steps, launched)
        # Without an op around its launch (a kernel from Python) it gets the lane that its thread had before.
        before = _last_before(lanes.get(thread, []), launched)
        lane = before.kind if before is not None and before.step == step else "forward"
        if kernel.kind == "copy" and lane == "forward":
            lane = "data"
        op = _last_before(ops.get(thread, []), launched)
        operator = op.kind if op is not None and op.end >= launched else ""
        result.append(kernel._replace(kind=lane, step=step, operator=operator))
    return result


def _last_before(intervals: list[Interval], time: int) -> Interval | None:
    """The last of sorted intervals that starts before a time."""
    place = bisect_right(intervals, time, key=lambda interval: interval.start) - 1
    return intervals[place] if place >= 0 else None


def _collectives(rows: Rows, notes: list[str]) -> list[Interval]:
    found = with_calls(rows, rows.collectives)
    if not found and any(rows.calls.values()):
        notes.append(
            "it has only the calls of its collectives, which may return before the transfer ends:"
            " profile with ProfilerActivity.CUDA, or use the gloo backend on the CPU"
        )
        found = [call for calls in rows.calls.values() for call in outermost(calls)]
    if not found:
        notes.append("it holds no collectives")
    elif not any(each.bytes for each in found):
        notes.append("it does not say how large its messages are: profile with record_shapes=True")
    return found


def _thread_lanes(intervals: Iterable[Interval], steps: list[Step], *, training: bool) -> list[Interval]:
    """A thread's lanes, in order. Of a thread that does not run the training loop, only backward work counts."""
    mine = [p._replace(step=step_at(steps, p.start)) for p in outermost(intervals)]
    if training:
        return _joined(_placed(mine))
    return _joined(p._replace(kind="backward") for p in mine if p.kind in ("backward", "finish"))


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Join neighbours of one lane and step with only Python between them; `intervals` are sorted by start."""
    result: list[Interval] = []
    for interval in intervals:
        before = result[-1] if result else None
        same = before is not None and (before.kind, before.step) == (interval.kind, interval.step)
        if before is not None and same and interval.start - before.end <= _JOIN_OPS:
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
