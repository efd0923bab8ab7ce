"""Post-processing of recorded spans: blocked time, DDP's copies out of its buckets, and sampled steps."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from syncline.trace.span import BLOCKED, ISSUING, STEP, TRAINING_LANES, Span

DDP_TAIL = "ddp tail"
"""The recorder's name for the time from DDP's last gradient until `backward` returns. `finish_spans` replaces it."""


def cut_blocked(spans: list[Span]) -> list[Span]:
    """Cut the times in which the training thread was blocked or issued messages out of its spans: those without a unit.

    A thread that is blocked issues no messages.
    """
    spans = _cut(spans, BLOCKED, lambda span: span.lane in TRAINING_LANES or span.name == ISSUING)
    return _cut(spans, ISSUING, lambda span: span.lane in TRAINING_LANES)


def _cut(spans: list[Span], name: str, from_span: Callable[[Span], bool]) -> list[Span]:
    """Cut the `wait` spans of this name out of those spans without a unit for which `from_span` holds."""
    holes: list[tuple[int, int]] = []
    for start, end in sorted((s.start, s.end) for s in spans if (s.lane, s.name) == ("wait", name) and s.end > s.start):
        if holes and start <= holes[-1][1]:
            start, end = holes[-1][0], max(end, holes.pop()[1])
        holes.append((start, end))
    if not holes:
        return spans
    ends = [end for _, end in holes]
    result = []
    for span in spans:
        if span.unit or not from_span(span):
            result.append(span)
            continue
        at = span.start
        for place in range(bisect_right(ends, span.start), len(holes)):
            begin, end = holes[place]
            if begin >= span.end:
                break
            if begin > at:
                result.append(replace(span, start=at, end=begin, bytes=0))
            at = max(at, end)
        if at < span.end or at == span.start:
            result.append(replace(span, start=at))
    return result


def finish_spans(spans: Sequence[Span], *, sampled: bool) -> list[Span]:
    """The spans of a recording as they go into the trace.

    With `sampled`, spans outside of recorded steps are dropped, except those that reach into a recorded step and those
    of the steps directly before and after one: the analysis needs them to find an engine's waits.
    """
    spans = _replace_ddp_tail(spans)
    if not sampled:
        return spans
    kept = {step for s in spans if s.lane == STEP for step in (s.step - 1, s.step, s.step + 1)}
    steps = sorted((s.start, s.end) for s in spans if s.lane == STEP)
    ends = [end for _, end in steps]

    def reaches_into_a_step(span: Span) -> bool:
        at = bisect_right(ends, span.start)
        return at < len(steps) and span.end > steps[at][0]

    return [span for span in spans if span.step in kept or reaches_into_a_step(span)]


def _replace_ddp_tail(spans: Sequence[Span]) -> list[Span]:
    """Split the tail: DDP waits for its last bucket, and then copies gradients out of its buckets (`unpack`)."""
    exchanges: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.lane in ("exchange", "decode"):
            exchanges[span.step].append(span)
    result = []
    for span in spans:
        if span.lane == "backward" and span.name == DDP_TAIL:
            ends = [e.end for e in exchanges[span.step] if e.start < span.end and e.end > span.start]
            begin = min(max(ends, default=span.start), span.end)
            if begin > span.start:
                result.append(replace(span, lane="wait", name=BLOCKED, end=begin))
            if begin < span.end:
                result.append(replace(span, name="unpack", start=begin))
        else:
            result.append(span)
    return result
