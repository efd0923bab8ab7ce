"""`LayoutChoice`: the stages of a model in a shape, their predicted steps, and the smallest shape that fits."""

from collections.abc import Callable, Sequence

from syncline.pipeline.blocks import Blocks
from syncline.pipeline.layout import Layout, frozen_sublayers, lay_out, parameter_counts
from syncline.pipeline.mesh import Shape
from syncline.pipeline.predict import SublayerTime, Time, Wire, best_micro_batches, costs_of
from syncline.pipeline.reshape import Offer, ReshapeCosts, largest_stage, smallest_shape
from syncline.pipeline.schedule import find_schedule
from syncline.sim import Network

_MOST_STAGES = 8
"""Of shapes to try at the start: simulations of deeper pipelines take seconds."""
_WORTH_A_TRIAL = 1.5
"""Ranks that share cores or a GPU, and hidden exchanges, make predictions wrong by about as much."""


class LayoutChoice:
    """Chooses by measured times of the sublayers, or by their parameters without them; alike on all ranks."""

    def __init__(
        self,
        blocks: Blocks,
        start: Shape,
        *,
        schedule: str,
        times: Sequence[SublayerTime] | None,
        network: Network | None,
        wire: Wire,
        cached: float | None,
    ) -> None:
        """Make it while this rank holds the whole model. `cached`: what it takes to read the activations of a sample.

        Without `times`, no `network` is needed: shapes are compared by the sizes of their stages.
        """
        self._blocks, self._start, self._schedule = blocks, start, schedule
        self.cached = cached
        """Seconds to read the activations of a sample behind the frozen sublayers of the first stage; None: they are
        computed."""
        self._times, self._network, self._wire = times, network, wire
        self._sizes = parameter_counts(blocks)
        self._limit = largest_stage(self._sizes, start.stages)
        self._world = start.stages * start.replicas
        self.samples = 0
        """The largest global batch so far."""

    @property
    def measured(self) -> bool:
        """Whether predictions are of seconds, not of sizes alone."""
        return self._times is not None

    def lay_out(self, shape: Shape) -> Layout:
        """Balanced stages, with the sublayers that are frozen now."""
        frozen, costs = frozen_sublayers(self._blocks), None
        if self._times is not None:
            costs = costs_of(self._times, frozen=frozen, rows=max(1.0, self.samples / self._world))
        return lay_out(
            shape, self._sizes, schedule=self._schedule, frozen=frozen, costs=costs, together=self.cached is not None
        )

    def predicted(self, layout: Layout) -> list[tuple[float, int]]:
        """(seconds, micro-batches) of simulated steps in a layout, the best first; by sizes without measured times."""
        times, network = self._times, self._network
        if times is None or network is None:
            times = [SublayerTime(Time(0.0, c), Time(0.0, 2.0 * c), 4 * c) for c in self._sizes]
            network = Network(latency=0.0, bytes_per_s=1e30)
        return best_micro_batches(
            times,
            layout,
            frozen=frozen_sublayers(self._blocks),
            samples=max(self.samples, self._world),
            network=network,
            wire=self._wire,
            cached=self.cached,
        )

    def smallest(self) -> Shape:
        """The shape with the fewest stages whose training part a rank can hold, as far as it has held as much."""
        return smallest_shape(self._sizes, self._start, frozen=frozen_sublayers(self._blocks), limit=self._limit)

    def offer(
        self, now: Layout, *, step_s: float, costs: ReshapeCosts, steps_left: int,
        runs: Callable[[Shape], bool], fewer: bool = True,
    ) -> Offer | None:  # fmt: skip
        """The change of the stages that gains most, or that is needed; None if there is nothing to change.

        Steps are predicted by the ratio of two simulated ones. `fewer`: also shapes with fewer stages, by halving.
        `runs(shape)`: whether the schedule can run in a shape; one that is needed is offered all the same.
        """
        smallest, stages = self.smallest(), now.shape.stages
        shapes = [now.shape]
        if smallest.stages > stages:
            shapes = [smallest]
        while fewer and stages > smallest.stages and stages % 2 == 0:
            stages //= 2
            shapes += [shape for shape in [Shape.of(self._world, stages)] if runs(shape)]
        before = self.predicted(now)[0][0]
        offers = []
        for layout in (self.lay_out(shape) for shape in shapes):
            if layout != now and (found := self.predicted(layout)):
                cost, assumed = costs.of(changes_shape=layout.shape != now.shape)
                after = step_s * found[0][0] / before
                offers.append(Offer(now.shape, layout.shape, step_s, after, cost, steps_left, assumed))
        return max(offers, key=lambda offer: offer.gain_s - offer.cost_s, default=None)

    def shapes_to_try(self, runs: Callable[[Shape], bool]) -> list[Shape]:
        """One stage, and the best of the others if its predicted step is not much longer.

        `runs(shape)`: whether the schedule can run in a shape.
        """
        most = min(self._world, _MOST_STAGES, len(self._sizes) // find_schedule(self._schedule).per_rank)
        divisors = [stages for stages in range(1, max(1, most) + 1) if self._world % stages == 0]
        steps = {}
        for shape in filter(runs, (Shape.of(self._world, stages) for stages in divisors)):
            if found := self.predicted(self.lay_out(shape)):
                steps[shape] = found[0][0]
        one, *others = sorted(steps, key=lambda shape: (shape.stages > 1, steps[shape]))
        return [one, *(shape for shape in others[:1] if steps[shape] < _WORTH_A_TRIAL * steps[one])]

    def allow(self, stages: int) -> None:
        """Ranks can hold what trains now in so many stages: the user says so."""
        held = largest_stage(self._sizes, stages, frozen=frozen_sublayers(self._blocks))
        self._limit = max(self._limit, held)
