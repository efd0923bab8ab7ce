"""`MicroBatchChoice`: the number of micro-batches per step and replica, as asked, as simulated, or as timed."""

from collections.abc import Callable

from syncline.errors import UsageError
from syncline.pipeline.layout import Layout
from syncline.pipeline.layout_choice import LayoutChoice
from syncline.pipeline.mesh import Shape
from syncline.pipeline.schedule import check_micro_batches

_UNCOUNTED, _TIMED = 1, 2
"""Steps with each number: the first one makes connections."""


class MicroBatchChoice:
    """The number for each shape. All ranks call it alike, and get the same numbers."""

    def __init__(self, schedule: str, asked: int | None, *, confirm: bool) -> None:
        """`asked`: the user's number. `confirm`: time several numbers in every shape, where none was asked for."""
        self._schedule, self._asked = schedule, asked or 0
        self._confirm = confirm and asked is None
        self._found: tuple[Shape, int] | None = None
        """The number that was simulated or timed last, and its shape: another shape may not be able to run it."""
        self._timed: Shape | None = None
        """The shape whose number was timed."""

    def number(self, shape: Shape) -> int:
        """1 without stages; twice the stages, where no number was asked for, simulated or timed."""
        if shape.stages == 1:
            return 1
        found = self._found[1] if self._found is not None and self._found[0] == shape else 0
        return self._asked or found or 2 * shape.stages

    def check(self, shape: Shape) -> None:
        """Raise unless the schedule can run this number in a shape."""
        if shape.stages > 1:
            check_micro_batches(self._schedule, self.number(shape), ranks=shape.stages)

    def runs_in(self, shape: Shape) -> bool:
        """Whether the schedule can run this number in a shape."""
        try:
            self.check(shape)
        except UsageError:
            return False
        return True

    def is_timed(self, shape: Shape) -> bool:
        """Whether the number of this shape was timed."""
        return self._timed == shape

    def must_be_timed(self, shape: Shape) -> bool:
        """Whether `confirm` asks to time the number of this shape."""
        return self._confirm and not self.is_timed(shape)

    def simulate(self, choice: LayoutChoice, layout: Layout) -> None:
        """Take the number with the shortest simulated step, if sublayers were measured and no number was asked for."""
        if choice.measured and not self._asked and layout.shape.stages > 1 and (best := choice.predicted(layout)):
            self._found = layout.shape, best[0][1]

    def time(
        self, choice: LayoutChoice, layout: Layout, step: Callable[[int], float], *, most: int
    ) -> dict[int, float]:
        """Time up to `most` of the numbers that simulate best, and the least; keep the fastest. Seconds by number.

        `step(number)`: the seconds of a step, the same on all ranks.
        """
        self._timed = layout.shape
        if layout.shape.stages == 1:
            return {}
        simulated = [number for _, number in choice.predicted(layout)]
        tried = list(dict.fromkeys([*simulated[: most - 1], min(simulated), *simulated]))[:most]
        seconds = {number: min([step(number) for _ in range(_UNCOUNTED + _TIMED)][_UNCOUNTED:]) for number in tried}
        if seconds:
            self._asked = 0
            self._found = layout.shape, min(seconds, key=lambda number: seconds[number])
        return seconds

    def resume(self, shape: Shape, number: int) -> None:
        """Continue a run that had timed this number: another one adds gradients in another order."""
        if self._confirm and shape.stages > 1:
            self._found, self._timed = (shape, number), shape
