"""What data loading hides: an exchange behind it comes to light when samples are loaded ahead."""

from collections.abc import Sequence

from syncline.trace.analysis.steps import Prepared
from syncline.trace.analysis.timeline import timeline

_COMES_BACK = ("exposed_encode", "exposed_exchange")


def behind_data(trace: Prepared, steps: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """By rank, ms of each step in which loading data hides transfers or compression that no other work hides."""
    return {rank: _of(trace, rank, steps) for rank in trace.ranks}


def _of(trace: Prepared, rank: int, steps: Sequence[int]) -> tuple[float, ...]:
    spans = trace.spans.get(rank, [])
    if not any(span.lane == "data" for span in spans):
        return (0.0,) * len(steps)
    without = timeline([span for span in spans if span.lane != "data"])
    result = []
    for step in steps:
        shown, seen = without.totals(*trace.bounds[rank][step]), trace.parts[rank][step]
        result.append(sum(shown[phase] - seen[phase] for phase in _COMES_BACK) / 1e6)
    return tuple(result)
