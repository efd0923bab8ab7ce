"""Times in which the training thread stood still: `wait` spans of their own, cut out of its compute spans."""

from bisect import bisect_left
from dataclasses import replace

from syncline.trace.span import Span

BLOCKED = "blocked"
"""The name of `wait` spans in which the training thread stood still; they are cut out of its compute spans."""

_TRAINING = frozenset({"data", "forward", "backward", "update"})


def cut_blocked(spans: list[Span]) -> list[Span]:
    """Take the times in which the training thread stood still out of its own spans, those without a unit."""
    holes = sorted((s.start, s.end) for s in spans if s.lane == "wait" and s.name == BLOCKED and s.end > s.start)
    if not holes:
        return spans
    starts = [start for start, _ in holes]
    result = []
    for span in spans:
        if span.lane not in _TRAINING or span.unit:
            result.append(span)
            continue
        at = span.start
        for begin, end in holes[bisect_left(starts, span.start) :]:
            if begin >= span.end:
                break
            if begin > at:
                result.append(replace(span, start=at, end=begin, bytes=0))
            at = max(at, end)
        if at < span.end or at == span.start:
            result.append(replace(span, start=at))
    return result
