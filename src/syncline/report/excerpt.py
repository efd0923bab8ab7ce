"""Which spans of a trace go into a page: all of them, or whole steps of its beginning and of its end."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.report.figures import plural
from syncline.trace.span import Span

LIMIT = 100_000
"""Spans of a run that a page holds at most."""

_BEGINNING = 0.25  # of the limit: start-up is told apart in a few steps, the steady ones are the larger part


@dataclass(frozen=True)
class Excerpt:
    """The spans that are shown, the steps that are not (first and last of them), and a sentence on it."""

    spans: Sequence[Span]
    gap: tuple[int, int] | None = None
    sentence: str = ""


def excerpt(spans: Sequence[Span], *, limit: int = LIMIT) -> Excerpt:
    """The first steps and the last ones, as many as `limit` spans allow; of a single huge step its longest spans."""
    if len(spans) <= limit:
        return Excerpt(spans)
    counts = Counter(span.step for span in spans)
    steps = sorted(counts)
    kept = _ends(steps, counts, limit)
    if not kept:
        last = steps[-1]
        longest = sorted((s for s in spans if s.step == last), key=lambda s: s.start - s.end)[:limit]
        text = f"Step {last} alone has {counts[last]:,} spans: its {len(longest):,} longest are shown."
        return Excerpt(longest, None, text)
    shown = [span for span in spans if span.step in kept]
    left_out = [step for step in steps if step not in kept]
    gap = (left_out[0], left_out[-1])
    text = (
        f"The trace has {len(spans):,} spans; here are the {len(shown):,} of {plural(len(kept), 'step')}."
        f" Steps {gap[0]} to {gap[1]} are left out."
    )
    return Excerpt(shown, gap, text)


def _ends(steps: list[int], counts: Counter[int], limit: int) -> set[int]:
    """Steps from the front until a share of the limit is used, then from the back as many as fit."""
    kept: set[int] = set()
    used = 0
    for step in steps:
        if used + counts[step] > limit * _BEGINNING:
            break
        kept.add(step)
        used += counts[step]
    for step in reversed(steps):
        if used + counts[step] > limit:
            break
        kept.add(step)
        used += counts[step]
    return kept
