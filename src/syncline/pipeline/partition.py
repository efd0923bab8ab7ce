"""Stages from whole sublayers: balanced by cost, PipeTransformer's greedy rule, and how many stages a model needs.

Pure functions over lists of costs, one per sublayer in the order of the forward pass.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from statistics import pvariance

from syncline.errors import UsageError

FROZEN_COST = 1 / 6
"""Cost of a frozen sublayer against a training one, before it is measured (PipeTransformer's factor)."""
_MILLION = 1e6

Stages = tuple[range, ...]
"""The sublayers of each stage."""
Rule = Callable[[Sequence[float], int], Stages]
"""A partition rule: sizes and number of stages to stages."""


def costs_by_parameters(parameters: Sequence[float], *, frozen: int) -> list[float]:
    """Costs before anything is measured: parameters, at `FROZEN_COST` for the first `frozen` sublayers."""
    return [count * (FROZEN_COST if at < frozen else 1.0) for at, count in enumerate(parameters)]


def balanced(costs: Sequence[float], stages: int, *, together: int = 0) -> Stages:
    """The partition into `stages` stages, none of them empty, with the smallest cost of the slowest stage.

    `together`: the first so many sublayers stay in the first stage, for a cache of their activations. Ties go to the
    partition with the smaller sum of squares, so that stages are even.
    """
    count = len(costs)
    if not 1 <= stages <= count - max(0, together - 1):
        raise UsageError(
            f"{stages} stages of {count} sublayers{f', {together} of them in one stage' if together > 1 else ''}: use"
            f" 1 to {count - max(0, together - 1)} stages"
        )
    upto = [0.0, *accumulate(costs)]
    first = max(1, together)
    # best[end] = ((slowest stage, sum of squares), cuts) of the first `end` sublayers in the stages so far
    best: dict[int, tuple[tuple[float, float], tuple[int, ...]]]
    best = {end: ((upto[end], upto[end] ** 2), (0, end)) for end in range(first, count + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                ((max(worst, load), squares + load**2), (*cuts, end))
                for start, ((worst, squares), cuts) in best.items()
                if start < end
                for load in (upto[end] - upto[start],)
            )
            for end in range(first + stage, count + 1)
        }
    return tuple(range(start, end) for start, end in pairwise(best[count][1]))


def greedy(sizes: Sequence[float], stages: int) -> Stages:
    """PipeTransformer's partition: fill a stage while its load stays below mean + variance of what remains.

    Both are divided by the number of stages that remain; `sizes` are parameter counts. A stage may be empty.
    """
    rest = [size / _MILLION for size in sizes]
    cuts, at = [0], 0
    for left in range(stages, 0, -1):
        remaining = rest[at:]
        limit = (sum(remaining) + (pvariance(remaining) if remaining else 0.0)) / left
        load = 0.0
        while at < len(rest) and (left == 1 or load + rest[at] < limit):
            load += rest[at]
            at += 1
        cuts.append(at)
    return tuple(range(start, end) for start, end in pairwise(cuts))


def largest(sizes: Sequence[float], stages: Stages) -> float:
    """The load of the largest stage."""
    return max(sum(sizes[at] for at in stage) for stage in stages)


def stages_that_fit(sizes: Sequence[float], *, stages: int, limit: float, rule: Rule = greedy) -> int:
    """Halve the number of stages while the largest one stays within `limit`; `sizes` are of training sublayers.

    PipeTransformer's rule, whose limit is the largest stage at the start of the run.
    """
    while stages % 2 == 0 and largest(sizes, rule(sizes, stages // 2)) <= limit:
        stages //= 2
    return stages
