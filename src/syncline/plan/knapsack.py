"""Spend an error budget where it saves most time: a knapsack with one option for each unit.

Minimise the sum of seconds with the sum of errors below a limit. Only options on the lower convex hull of (error,
seconds) can be good for some limit. Starting from the least error everywhere, the step along a hull that saves most
seconds per error comes next, until no step fits. What is missed is less than the gain of one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True)
class Option:
    """A way to send a unit: its seconds, and its share of the error."""

    seconds: float
    error: float


def spend(units: Sequence[Sequence[Option]], limit: float) -> list[int]:
    """For each unit the number of its option; the sum of errors is at most `limit`, or the least that is possible."""
    hulls = [hull(options) for options in units]
    at = [0] * len(hulls)
    left = limit - sum(options[way[0]].error for options, way in zip(units, hulls, strict=True))

    def rate(unit: int) -> float:
        """Minus the seconds saved per error by the next step along a unit's hull."""
        now, then = (units[unit][hulls[unit][at[unit] + k]] for k in (0, 1))
        return (then.seconds - now.seconds) / (then.error - now.error)

    moves = [(rate(unit), unit) for unit, way in enumerate(hulls) if len(way) > 1]
    heapify(moves)
    while moves:
        _, unit = heappop(moves)
        now, then = (units[unit][hulls[unit][at[unit] + k]] for k in (0, 1))
        if then.error - now.error > left:
            continue  # later steps of this unit need even more
        left -= then.error - now.error
        at[unit] += 1
        if at[unit] + 1 < len(hulls[unit]):
            heappush(moves, (rate(unit), unit))
    return [way[place] for way, place in zip(hulls, at, strict=True)]


def hull(options: Sequence[Option]) -> list[int]:
    """Options on the lower convex hull, by error; each is faster than the one before, by less and less per error."""
    order = sorted(range(len(options)), key=lambda n: (options[n].error, options[n].seconds, n))
    kept: list[int] = []
    for n in order:
        if kept and options[n].seconds >= options[kept[-1]].seconds:
            continue
        while len(kept) > 1 and _slope(options, kept[-1], n) <= _slope(options, kept[-2], kept[-1]):
            kept.pop()
        kept.append(n)
    return kept


def _slope(options: Sequence[Option], first: int, second: int) -> float:
    a, b = options[first], options[second]
    return (b.seconds - a.seconds) / (b.error - a.error)
