"""Statistics of a sample, in plain Python: no numpy on a machine that only trains."""

import math
from collections.abc import Sequence

from syncline import stats as robust
from syncline.results.file import Summary


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile by linear interpolation between order statistics (numpy's default).

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    if not values:
        raise ValueError("the quantile of no values is not defined: give at least one")
    return robust.quantile(values, q)


def median(values: Sequence[float]) -> float:
    """The middle value: half of the steps took longer."""
    return quantile(values, 0.5)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, summed without rounding error."""
    if not values:
        raise ValueError("the mean of no values is not defined: give at least one")
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """The sample's standard deviation (n - 1 below the line); 0 for a single value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def p95(values: Sequence[float]) -> float:
    """One step in twenty took longer than this."""
    return quantile(values, 0.95)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The bounds of the middle half."""
    return quantile(values, 0.25), quantile(values, 0.75)


def summary(values: Sequence[float]) -> Summary:
    """The `step_ms` table of a sample; all null when it is empty."""
    if not values:
        return {"median": None, "mean": None, "p95": None, "std": None, "q1": None, "q3": None, "n": 0}
    low, high = quartiles(values)
    return {
        "median": median(values),
        "mean": mean(values),
        "p95": p95(values),
        "std": std(values),
        "q1": low,
        "q3": high,
        "n": len(values),
    }


def median_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """A confidence interval of the median from order statistics: no assumption on the distribution, no randomness.

    The k-th smallest and k-th largest values enclose the true median with probability 1 - 2 P(B < k), where B
    is binomial(n, 1/2). With fewer than 6 values no pair reaches 95%: the whole range is given.
    """
    if not values:
        raise ValueError("the interval of no values is not defined: give at least one")
    ordered = sorted(values)
    n = len(ordered)
    tail = (1 - confidence) / 2
    # In logarithms, so that thousands of steps do not underflow.
    log_half_n = n * math.log(0.5)
    cumulative, k = 0.0, 0
    while k < n // 2:
        log_pmf = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + log_half_n
        cumulative += math.exp(log_pmf)
        if cumulative > tail:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]
