"""`ShapeTrial`: a job's first steps run in several shapes, one after the other; the fastest shape is kept."""

from collections.abc import Sequence

from syncline.pipeline.mesh import Shape

_UNCOUNTED, _TIMED = 1, 2
"""Steps in each shape: the first one makes connections."""


class ShapeTrial:
    """Says in which shape the next step runs. It knows nothing of ranks; all ranks give it the same seconds."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        """`shapes`: what to time, the shape of the start first."""
        assert shapes, "there is always the shape of the start"
        self._left = list(shapes[1:])
        self._current = shapes[0]
        self._steps = 0
        self.over = len(shapes) == 1
        """Whether the fastest shape is known."""
        self.seconds: dict[Shape, float] = {}
        """The fastest step of each shape so far."""

    def after_step(self, seconds: float) -> Shape | None:
        """The shape of the next step; None when the trial is over and the shape stays as it is.

        >>> one, two = Shape(1, 2), Shape(2, 1)
        >>> trial = ShapeTrial([one, two])
        >>> [str(trial.after_step(s)) for s in (9, 3, 2, 8, 4, 5)], str(trial.after_step(2))
        (['1x2', '1x2', '2x1', '2x1', '2x1', '1x2'], 'None')
        """
        if self.over:
            return None
        self._steps += 1
        if self._steps > _UNCOUNTED:
            self.seconds[self._current] = min(seconds, self.seconds.get(self._current, seconds))
        if self._steps < _UNCOUNTED + _TIMED:
            return self._current
        if self._left:
            self._current, self._steps = self._left.pop(0), 0
            return self._current
        fastest = min(self.seconds, key=lambda shape: self.seconds[shape])
        self.over = True
        return None if fastest == self._current else fastest
