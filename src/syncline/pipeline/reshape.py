"""The decision to reshape: fewer stages if they fit and the rest of the run pays for it, more where they must."""

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.pipeline.mesh import Shape
from syncline.pipeline.partition import Stages, balanced, largest, stages_that_fit

_FIRST_SHAPE_S, _FIRST_BALANCE_S = 2.0, 0.5
"""Assumed cost of the first change of shape, with new groups and a new engine, and of the first new balance."""


class ReshapeCosts:
    """Seconds of the last change of the stages of each kind; before there was one, an assumption."""

    def __init__(self, start_s: float) -> None:
        """`start_s`: seconds of the start, which makes groups and engines as a change of shape does."""
        self._assumed = {True: max(_FIRST_SHAPE_S, start_s), False: _FIRST_BALANCE_S}
        self._measured: dict[bool, float] = {}
        self._last: bool | None = None
        """The kind of the last change; None before there was one."""

    def of(self, *, changes_shape: bool) -> tuple[float, bool]:
        """The seconds, and whether they are assumed; without `changes_shape`, of a new balance of the stages."""
        return self._measured.get(changes_shape, self._assumed[changes_shape]), changes_shape not in self._measured

    def measured(self, seconds: float, *, changes_shape: bool) -> None:
        """There was a change that took so long."""
        self._measured[changes_shape], self._last = seconds, changes_shape

    def add(self, seconds: float) -> None:
        """The last change, or the start, took so much longer: micro-batches were timed after it."""
        if self._last is None:
            self._assumed[True] += seconds
        else:
            self._measured[self._last] += seconds


@dataclass(frozen=True)
class Offer:
    """A possible reshape: both shapes, seconds per step before and after, its cost, and the steps that remain.

    With the same shape twice, the stages are balanced again.
    """

    old: Shape
    new: Shape
    step_s: float
    new_step_s: float
    cost_s: float
    steps_left: int
    assumed: bool = False
    """Whether the cost is an assumption: there was no such change in this run yet."""

    @property
    def gain_s(self) -> float:
        """Seconds that the rest of the run would save, before the cost."""
        return (self.step_s - self.new_step_s) * self.steps_left

    @property
    def pays(self) -> bool:
        """Whether the gain exceeds the cost."""
        return self.gain_s > self.cost_s

    @property
    def needed(self) -> bool:
        """Whether it has more stages: blocks train again, and a rank may not be able to hold so many of them."""
        return self.new.stages > self.old.stages

    @property
    def payback_steps(self) -> float:
        """Steps after which the cost is recovered; infinite if a step does not get shorter."""
        saved = self.step_s - self.new_step_s
        return self.cost_s / saved if saved > 0 else float("inf")

    def __str__(self) -> str:
        """One sentence about the decision."""
        verb = "is needed" if self.needed else "pays" if self.pays else "does not pay"
        cost = f"cost {self.cost_s:.2f} s{', assumed' if self.assumed else ''}"
        return (
            f"reshape {self.old} -> {self.new} {verb}: {1e3 * self.step_s:.1f} -> {1e3 * self.new_step_s:.1f} ms per"
            f" step, {self.steps_left} steps left, {cost}"
        )


def smallest_shape(sizes: Sequence[float], start: Shape, *, frozen: int, limit: float) -> Shape:
    """The shape with the fewest stages, by halving, whose largest stage is within `limit`; every rank stays busy.

    `start` is the first shape of the run. `sizes` are the sublayers' parameters, of which the first `frozen` need no
    gradients and no optimizer state.
    """
    training = sizes[frozen:] or [0.0]
    stages = stages_that_fit(training, stages=start.stages, limit=limit, rule=_even)
    return Shape.of(start.stages * start.replicas, stages)


def largest_stage(sizes: Sequence[float], stages: int, *, frozen: int = 0) -> float:
    """The training parameters of the largest stage: what a rank can hold, if it has trained in that shape."""
    training = sizes[frozen:] or [0.0]
    return largest(training, _even(training, stages))


def _even(sizes: Sequence[float], stages: int) -> Stages:
    return balanced(sizes, min(stages, len(sizes)))
