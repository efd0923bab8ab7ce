"""Idle time of the GPU in a torch.profiler trace: each gap with its kind and what the host did, and blocking calls."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from syncline.trace.formats.profiler_rows import BEFORE, Interval, Rows, Thread, outermost
from syncline.trace.formats.trace_file import Step, step_at
from syncline.trace.gpu_activity import (
    DATA_LOADING,
    HOST_WAIT,
    KERNEL_WAIT,
    OTHER_WAIT,
    BlockedTime,
    GpuActivity,
    IdleTime,
)
from syncline.trace.intervals import busy_periods

_KERNEL_GAP = 30_000  # nanoseconds: a shorter gap before a kernel that was launched in time is the usual one; HTA's too
_BLOCKING_COPY = 20_000  # nanoseconds: a shorter call of a copy is the launch alone
_AFTER_SYNC = 50_000  # nanoseconds from the end of the GPU's work to the end of the call that waited for it
_NESTED = 32  # ranges of a user inside one another, at most
_PASSES = {"forward": "the forward pass", "backward": "the backward pass", "update": "the update"}


class _Gap(NamedTuple):
    """Time in which the GPU (or a stream) had nothing to do, and the launch of the kernel that ended it."""

    start: int
    end: int
    thread: Thread
    launched: int


def gpu_activity(rows: Rows, lanes: Mapping[Thread, list[Interval]], steps: list[Step]) -> GpuActivity:
    """Idle and blocked time of the steps; `lanes` are the lanes of all threads."""
    on_device = (one for one in (*rows.kernels, *rows.collectives) if one.stream)
    work = sorted(one for one in on_device if rows.launched(one) > BEFORE)
    host = _Host(rows, lanes)
    idle: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    busy = busy_periods((one.start, one.end) for one in work)
    for gap in _gaps(rows, work):
        step = step_at(steps, gap.launched)
        if step < 0:
            continue
        kind = _kind(gap)
        loading = _common(gap.start, gap.end, host.loading)
        if loading:
            idle[step, kind, DATA_LOADING].append(loading)
        if gap.end - gap.start > loading:
            doing = host.doing(gap) if kind == HOST_WAIT else ""
            idle[step, kind, doing].append(gap.end - gap.start - loading)
    blocked: dict[tuple[int, str], list[int]] = defaultdict(list)
    for call in host.blocking:
        step = step_at(steps, call.start)
        if step >= 0 and _common(call.start, call.end, busy):
            blocked[step, call.kind].append(call.end - call.start)
    streams: dict[str, Counter[str]] = defaultdict(Counter)
    by_stream: dict[str, list[Interval]] = defaultdict(list)
    for one in work:
        by_stream[one.stream].append(one)
    for stream, mine in by_stream.items():
        for gap in _gaps(rows, mine):
            streams[stream][_kind(gap)] += gap.end - gap.start
    return GpuActivity(
        tuple(IdleTime(*key, len(of), sum(of), max(of)) for key, of in sorted(idle.items())),
        tuple(BlockedTime(*key, len(of), sum(of)) for key, of in sorted(blocked.items())),
        {stream: dict(of) for stream, of in sorted(streams.items())},
    )


class _Host:
    """What the threads that launch kernels did."""

    def __init__(self, rows: Rows, lanes: Mapping[Thread, list[Interval]]) -> None:
        self._lanes = lanes
        self._ops = {thread: outermost(ops) for thread, ops in rows.ops.items()}
        launching = {rows.launches[k.correlation].thread for k in rows.kernels if k.correlation in rows.launches}
        self._ranges = {thread: sorted(mine) for thread, mine in rows.ranges.items()}
        self._calls = {thread: outermost(calls) for thread, calls in rows.runtime.items()}
        self.blocking = outermost(
            [
                *(self._named(thread, call) for thread in launching for call in rows.syncs.get(thread, ())),
                *(self._named(*pair) for pair in _blocking_copies(rows)),
            ]
        )
        """Calls that wait for the GPU, named by their operator."""
        self._blocking_ends = [call.end for call in self.blocking]
        loading = (one for mine in lanes.values() for one in mine if one.kind == "data")
        self.loading = busy_periods((one.start, one.end) for one in loading)

    def doing(self, gap: _Gap) -> str:
        """What kept the host from launching the next kernel, in a few words."""
        # A call that waited for the GPU returns when the GPU is done: the gap starts before its end.
        place = bisect_left(self._blocking_ends, gap.start)
        if place < len(self.blocking):
            call = self.blocking[place]
            # A short wait does not explain a long gap: without it the host would be hardly earlier.
            waited = 2 * (gap.start - call.start) >= gap.end - gap.start
            if waited and call.end <= max(gap.launched, gap.start + _AFTER_SYNC):
                return f"after {call.kind}"
        spent: Counter[str] = Counter()
        for one in _within(self._calls.get(gap.thread, []), gap.start, gap.launched):
            spent[one.kind] += min(one.end, gap.launched) - max(one.start, gap.start)
        calls = sum(spent.values())
        ops: Counter[str] = Counter()
        for one in _within(self._ops.get(gap.thread, []), gap.start, gap.launched):
            ops[one.kind] += min(one.end, gap.launched) - max(one.start, gap.start)
        python = gap.launched - gap.start - max(calls, sum(ops.values()))
        spent.update(ops)
        name, most = spent.most_common(1)[0] if spent else ("", 0)
        return name if most >= python else f"Python {self._place(gap)}"

    def _place(self, gap: _Gap) -> str:
        """Where in the loop most of a gap was: in or before a pass, or in a range that the user named."""
        ranges = self._ranges.get(gap.thread, [])
        last = bisect_right(ranges, gap.launched, key=lambda one: one.start)
        for one in reversed(ranges[max(0, last - _NESTED) : last]):
            if one.start <= gap.start and one.end >= gap.launched:
                return f"in '{one.kind}'"
        mine = self._lanes.get(gap.thread, [])
        place = bisect_right(mine, gap.launched, key=lambda one: one.start) - 1
        if place < 0 or mine[place].end < gap.start or mine[place].kind not in _PASSES:
            return "in the step"
        before = 2 * (mine[place].start - gap.start) > gap.launched - gap.start
        return f"{'before' if before else 'in'} {_PASSES[mine[place].kind]}"

    def _named(self, thread: Thread, call: Interval) -> Interval:
        ops = self._ops.get(thread, [])
        place = bisect_right(ops, call.start, key=lambda one: one.start) - 1
        inside = place >= 0 and ops[place].end >= call.end
        if not inside:
            return call._replace(kind=f"{call.kind} {self._place(_Gap(call.start, call.end, thread, call.end))}")
        around, name = ops[place], f"{ops[place].kind} ({call.kind})"
        # Without the wait, an operator such as aten::item is not needed either; other operators do more than to wait.
        if 2 * (call.end - call.start) < around.end - around.start:
            return call._replace(kind=name)
        return call._replace(kind=name, start=around.start, end=around.end)


def _blocking_copies(rows: Rows) -> Iterator[tuple[Thread, Interval]]:
    """Calls of copies that returned only after the GPU had begun to copy, as those of pageable memory do."""
    for kernel in rows.kernels:
        launch = rows.launches.get(kernel.correlation)
        if launch is None or not kernel.name.startswith("Memcpy"):
            continue
        if launch.end >= kernel.start and launch.end - launch.start >= _BLOCKING_COPY:
            yield launch.thread, Interval(launch.start, launch.end, launch.name)


def _gaps(rows: Rows, work: Sequence[Interval]) -> Iterator[_Gap]:
    """The gaps between work that is sorted by start; a gap before work without a known launch is left out."""
    end = work[0].end if work else 0
    for one in work:
        if one.start > end:
            launch = rows.launches.get(one.correlation)
            if launch is not None:
                yield _Gap(end, one.start, launch.thread, launch.start)
        end = max(end, one.end)


def _kind(gap: _Gap) -> str:
    if gap.launched > gap.start:
        return HOST_WAIT
    return KERNEL_WAIT if gap.end - gap.start < _KERNEL_GAP else OTHER_WAIT


def _within(intervals: Sequence[Interval], start: int, end: int) -> Iterable[Interval]:
    """Those of sorted intervals without overlap that overlap a time."""
    first = bisect_right(intervals, start, key=lambda one: one.end)
    for one in islice(intervals, first, None):
        if one.start >= end:
            return
        yield one


def _common(start: int, end: int, periods: Sequence[tuple[int, int]]) -> int:
    """The time of an interval that lies in these periods."""
    total = 0
    for begin, stop in islice(periods, bisect_right(periods, start, key=lambda period: period[1]), None):
        if begin >= end:
            break
        total += min(end, stop) - max(start, begin)
    return total
