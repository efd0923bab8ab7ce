"""Figures of a series of steps that a few odd steps do not spoil, in plain Python."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile by linear interpolation; 0 of nothing.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def middle(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return quantile(values, 0.5)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; 0 of nothing."""
    return math.fsum(values) / len(values) if values else 0.0


def usual(values: Sequence[float]) -> float:
    """The mean, with what is outside the inner nine tenths pulled in to their bounds.

    What happens in one step of ten counts, what happened once does not.

    >>> usual([1.0] * 99 + [1000.0])
    1.0
    """
    low, high = quantile(values, 0.05), quantile(values, 0.95)
    return mean([min(max(value, low), high) for value in values])


def doubt(values: Sequence[float]) -> float:
    """Two standard errors of `usual`: a figure that is smaller than this may be chance."""
    if len(values) < 2:
        return math.inf
    low, high = quantile(values, 0.05), quantile(values, 0.95)
    pulled = [min(max(value, low), high) for value in values]
    centre = mean(pulled)
    variance = math.fsum((value - centre) ** 2 for value in pulled) / (len(pulled) - 1)
    return 2 * math.sqrt(variance / len(pulled))


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, mean and 95th percentile."""
    return {"median": middle(values), "mean": mean(values), "p95": quantile(values, 0.95)}
