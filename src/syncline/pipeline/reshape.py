"""The decision to reshape: fewer stages and more replicas, if they fit and the rest of the run pays for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.pipeline.mesh import Shape
from syncline.pipeline.partition import balanced, largest, stages_that_fit


@dataclass(frozen=True)
class Offer:
    """A possible reshape: both shapes, seconds per step before and after, its cost, and the steps that remain."""

    old: Shape
    new: Shape
    step_s: float
    new_step_s: float
    cost_s: float
    steps_left: int

    @property
    def gain_s(self) -> float:
        """Seconds that the rest of the run would save, before the cost."""
        return (self.step_s - self.new_step_s) * self.steps_left

    @property
    def pays(self) -> bool:
        """Whether the gain exceeds the cost."""
        return self.gain_s > self.cost_s

    @property
    def payback_steps(self) -> float:
        """Steps after which the cost is recovered; infinite if a step does not get shorter."""
        saved = self.step_s - self.new_step_s
        return self.cost_s / saved if saved > 0 else float("inf")

    def __str__(self) -> str:
        """One sentence about the decision."""
        verb = "pays" if self.pays else "does not pay"
        return (
            f"reshape {self.old} -> {self.new} {verb}: {1e3 * self.step_s:.1f} -> {1e3 * self.new_step_s:.1f} ms per"
            f" step, {self.steps_left} steps left, cost {self.cost_s:.2f} s"
        )


def smallest_shape(sizes: Sequence[float], now: Shape, *, frozen: int, limit: float) -> Shape:
    """The shape with the fewest stages, by halving, whose largest stage is within `limit`; every rank stays busy.

    `sizes` are the sublayers' parameters, of which the first `frozen` need no gradients and no optimizer state.
    """
    training = list(sizes[frozen:]) or [0.0]

    def even(parts: Sequence[float], stages: int) -> tuple[range, ...]:
        return balanced(parts, min(stages, len(parts)))

    stages = stages_that_fit(training, stages=now.stages, limit=limit, rule=even)
    return Shape.of(now.stages * now.replicas, stages)


def limit_at_start(sizes: Sequence[float], stages: int) -> float:
    """The largest stage of a model that trains as a whole: what a rank can hold, since it held that."""
    return largest(sizes, balanced(sizes, stages))
