"""Intervals of time, pairs of start and end: their union, and its length."""

from collections.abc import Iterable


def busy_periods(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The intervals with those that overlap joined, in order.

    >>> busy_periods([(0, 10), (30, 31), (5, 20)])
    [(0, 20), (30, 31)]
    """
    periods: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if periods and start < periods[-1][1]:
            periods[-1] = periods[-1][0], max(end, periods[-1][1])
        else:
            periods.append((start, end))
    return periods


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of these intervals.

    >>> covered([(0, 10), (5, 20), (30, 31)])
    21
    """
    return sum(end - start for start, end in busy_periods(intervals))
