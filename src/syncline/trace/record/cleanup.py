"""Recorded spans as a trace has them: the steps asked for, and what follows DDP's wait for its buckets told from it."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from syncline.trace.record.loop_hooks import RETURNED
from syncline.trace.span import STEP, Span


def settled(spans: Sequence[Span], *, sampled: bool) -> list[Span]:
    """The spans to keep; with `sampled` those of recorded steps, of the steps before and behind where an engine was
    watched there (its ranks' waits are told by them), and others' that reach into a recorded step."""
    made = _unpacked(spans)
    if not sampled:
        return made
    kept = {step for s in made if s.lane == STEP for step in (s.step - 1, s.step, s.step + 1)}
    steps = sorted((s.start, s.end) for s in made if s.lane == STEP)
    ends = [end for _, end in steps]

    def inside(span: Span) -> bool:
        at = bisect_right(ends, span.start)
        return at < len(steps) and span.end > steps[at][0]

    return [span for span in made if span.step in kept or inside(span)]


def _unpacked(spans: Sequence[Span]) -> list[Span]:
    """When the last exchange has ended, DDP copies gradients out of its buckets: that is backward again."""
    exchanges: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.lane in ("exchange", "decode"):
            exchanges[span.step].append(span)
    made = []
    for span in spans:
        if span.lane == "backward" and span.name == RETURNED:
            ends = [e.end for e in exchanges[span.step] if e.start < span.end and e.end > span.start]
            begin = min(max(ends, default=span.start), span.end)
            if begin < span.end:
                made.append(replace(span, name="unpack", start=begin))
        else:
            made.append(span)
    return made
