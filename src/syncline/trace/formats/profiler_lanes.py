"""Assigns the work of a torch.profiler trace's threads to lanes and steps, from their outermost ranges and ops."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from syncline.trace.formats.trace_file import Step, step_at

_JOIN = 500_000  # nanoseconds: ops of a lane that are closer, with nothing between, are one span (Python runs there)

Thread = int | str
"""A thread's name in a trace."""


class Interval(NamedTuple):
    """An interval of work of a thread.

    `kind` is a lane. Before `thread_lanes` it can also be `op` (an op of any lane) or `finish` (DDP's copies after the
    backward pass).
    """

    start: int
    end: int
    kind: str
    step: int = -1


def thread_lanes(intervals: Iterable[Interval], steps: list[Step], *, training: bool) -> list[Interval]:
    """A thread's lanes, in order. Of a thread that does not run the training loop, only backward work counts."""
    outermost = [
        interval._replace(step=step_at(steps, interval.start, interval.end)) for interval in _outermost(intervals)
    ]
    if training:
        return joined(_placed(outermost), _JOIN)
    own = ("backward", "finish")
    return joined([interval._replace(kind="backward") for interval in outermost if interval.kind in own], _JOIN)


def joined(intervals: Iterable[Interval], gap: int) -> list[Interval]:
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


def without(intervals: list[Interval], holes: Iterable[tuple[int, int]]) -> list[Interval]:
    """The intervals of one thread with the holes removed."""
    apart = joined([Interval(start, end, "") for start, end in sorted(holes)], 0)
    result: list[Interval] = []
    ends = [hole.end for hole in apart]
    for interval in intervals:
        at = interval.start
        for place in range(bisect_right(ends, interval.start), len(apart)):
            hole = apart[place]
            if hole.start >= interval.end:
                break
            if hole.start > at:
                result.append(interval._replace(start=at, end=hole.start))
            at = hole.end
        if at < interval.end:
            result.append(interval._replace(start=at))
    return result


def _outermost(intervals: Iterable[Interval]) -> list[Interval]:
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
