"""Traces made by hand for comparisons: steps with known phases and a known noise."""

import random

from syncline.trace import Span, Trace

MS = 1_000_000


def trace(*, steps=30, ranks=2, forward=10.0, exchange=8.0, noise=0.02, seed=0, size=1000, units=("a", "b"), warm=True):
    """Forward, then an exchange a unit and 2 ms of update; noise of neighbouring steps is alike, one step is slow."""
    numbers, spans, at, drift = random.Random(seed), [], 0.0, 0.0
    for step in range(steps):
        drift = 0.6 * drift + numbers.gauss(0, noise)
        factor = max(0.2, 1 + drift) * (4 if warm and step == 0 else 1)
        begin, now = at, at + forward * factor
        for rank in range(ranks):
            spans.append(span(rank, "forward", step, begin, now))
        for unit in units:
            length = exchange / len(units) * max(0.2, 1 + numbers.gauss(0, noise))
            for rank in range(ranks):
                spans.append(span(rank, "exchange", step, now, now + length, unit, size))
            now += length
        for rank in range(ranks):
            spans.append(span(rank, "update", step, now, now + 2))
            spans.append(span(rank, "step", step, begin, now + 2))
        at = now + 2
    return Trace.of(spans).spans


def span(rank, lane, step, start, end, unit="", size=0):
    """Times in ms."""
    return Span(rank, lane, "all-reduce" if unit else lane, unit, step, round(start * MS), round(end * MS), size)
