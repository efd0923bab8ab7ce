"""`ShapeTrial`: a job's first steps run in several shapes, one after the other; the fastest shape is kept."""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from syncline.pipeline.mesh import Shape
from syncline.pipeline.rank_clock import RankClock

_UNCOUNTED, _TIMED = 1, 2
"""Steps in each shape: the first one makes connections."""


class ShapeTrial:
    """Times steps of the job until the fastest shape is known. All ranks call it together, and get the same answers."""

    def __init__(self, clock: RankClock, *, trying: bool) -> None:
        """`trying`: there is something to choose; without it the shape of the start stays."""
        self.trying = trying
        """Whether the first steps have still to choose the shape."""
        self._clock = clock
        self.restart()

    def restart(self, *, chosen: bool = False) -> None:
        """Forget the times so far: other layers train now. `chosen`: the shape is not to be tried any more."""
        self.trying = self.trying and not chosen
        self._steps: Generator[Shape, float, Shape] | None = None
        self._began: Any = None

    def begin_step(self) -> None:
        """The next step begins now, in its shape."""
        self._began = self._clock.mark()

    def after_step(self, current: Shape, others: Callable[[], Iterable[Shape]]) -> Shape:
        """The shape of the next step: the current one if no step has begun.

        `others` are the shapes to try besides the current one; it is called once, after the first step.
        """
        if self._began is None:
            return current
        seconds = self._clock.seconds_since(self._began)
        try:
            if self._steps is None:
                self._steps = steps_of(list(dict.fromkeys([current, *others()])))
                next(self._steps)
            return self._steps.send(seconds)
        except StopIteration as end:
            self.trying = False
            fastest: Shape = end.value
            return fastest


def steps_of(shapes: Sequence[Shape]) -> Generator[Shape, float, Shape]:
    """Yields the shape of each step of a trial, and gets its seconds; returns the fastest of `shapes`.

    >>> steps = steps_of([Shape(1, 2), Shape(2, 1)])
    >>> str(next(steps)), [str(steps.send(seconds)) for seconds in (9, 3, 2, 8, 4)]
    ('1x2', ['1x2', '1x2', '2x1', '2x1', '2x1'])
    """
    if len(shapes) == 1:
        return shapes[0]
    fastest: dict[Shape, float] = {}
    for shape in shapes:
        seconds = []
        for _ in range(_UNCOUNTED + _TIMED):
            seconds.append((yield shape))
        fastest[shape] = min(seconds[_UNCOUNTED:])
    return min(fastest, key=lambda shape: fastest[shape])
