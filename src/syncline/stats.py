"""Statistics of a sample in plain Python: median, quantile, mean, standard deviation, confidence intervals.

They need no numpy, so that a machine that only trains does not load it.
"""

import itertools
import math
from collections.abc import Sequence
from statistics import fmean
from typing import NotRequired, TypedDict


class Summary(TypedDict):
    """A distribution of step times in ms. Every figure is null for an empty sample."""

    median: float | None
    mean: float | None
    p95: float | None
    std: NotRequired[float | None]
    q1: NotRequired[float | None]
    q3: NotRequired[float | None]
    n: NotRequired[int]


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile by linear interpolation between order statistics (numpy's default).

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    if not values:
        raise ValueError("the quantile of no values is not defined: give at least one")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return quantile(values, 0.5)


def p95(values: Sequence[float]) -> float:
    """The 95th percentile: one value in twenty is larger."""
    return quantile(values, 0.95)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, summed without rounding error."""
    return fmean(values)


def median_or_zero(values: Sequence[float]) -> float:
    """The median, or 0 for an empty sample."""
    return median(values) if values else 0.0


def mean_or_zero(values: Sequence[float]) -> float:
    """The mean, or 0 for an empty sample."""
    return mean(values) if values else 0.0


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def std(values: Sequence[float]) -> float:
    """The standard deviation of a sample (divided by n - 1); 0 for a single value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The middle of pairs (value, weight) by weight; 0 for an empty sample."""
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    return 0.0


def winsorized(values: Sequence[float]) -> list[float]:
    """The values with those outside the 5th to 95th percentile moved to these bounds."""
    low, high = (quantile(values, 0.05), p95(values)) if values else (0.0, 0.0)
    return [min(max(value, low), high) for value in values]


def winsorized_mean(values: Sequence[float]) -> float:
    """The mean of `winsorized` values, or 0 for an empty sample.

    An event in every tenth step counts; a single outlier does not.

    >>> winsorized_mean([1.0] * 99 + [1000.0])
    1.0
    """
    return mean_or_zero(winsorized(values))


def upper_limit(values: Sequence[float]) -> float:
    """What is larger than this is no chance variation: a quarter, or four spreads, above the median.

    >>> upper_limit([19.0, 20.0, 20.0, 21.0, 90.0])
    25.9304
    """
    middle = median_or_zero(values)
    spread = 1.4826 * median_or_zero([abs(value - middle) for value in values])
    return middle + max(4 * spread, 0.25 * middle)


def two_standard_errors(values: Sequence[float]) -> float:
    """Two standard errors of `winsorized_mean`: a smaller effect may be chance. Infinite for fewer than two values."""
    return 2 * std(winsorized(values)) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def median_mean_p95(values: Sequence[float]) -> dict[str, float]:
    """Median, mean and 95th percentile; zeros for an empty sample."""
    return {"median": median_or_zero(values), "mean": mean_or_zero(values), "p95": p95(values) if values else 0.0}


def summary(values: Sequence[float]) -> Summary:
    """The `step_ms` table of a sample; all null when it is empty."""
    if not values:
        return {"median": None, "mean": None, "p95": None, "std": None, "q1": None, "q3": None, "n": 0}
    return {
        "median": median(values),
        "mean": mean(values),
        "p95": p95(values),
        "std": std(values),
        "q1": quantile(values, 0.25),
        "q3": quantile(values, 0.75),
        "n": len(values),
    }


def median_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """A confidence interval of the median from order statistics: no assumption on the distribution, no randomness.

    The k-th smallest and k-th largest values enclose the true median with probability 1 - 2 P(B < k), where B
    is binomial(n, 1/2). With fewer than 6 values no pair reaches 95%: the whole range is given.
    """
    if not values:
        raise ValueError("the interval of no values is not defined: give at least one")
    ordered, n = sorted(values), len(values)

    def probability(k: int) -> float:
        # In logarithms, so that thousands of steps do not underflow.
        return math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2))

    below = itertools.accumulate(probability(k) for k in range(n // 2))
    k = max(1, sum(1 for _ in itertools.takewhile(lambda p: p <= (1 - confidence) / 2, below)))
    return ordered[k - 1], ordered[n - k]


_STUDENT = (
    12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5% quantile of Student's distribution with 1, 2, ... 30 degrees of freedom."""


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% confidence interval of the mean, by Student's distribution; None for fewer than two values.

    >>> mean_interval([1.0, 2.0, 3.0])
    (-0.4843, 4.4843)
    """
    if len(values) < 2:
        return None
    factor = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    centre, half = mean(values), factor * std(values) / math.sqrt(len(values))
    return round(centre - half, 4), round(centre + half, 4)
