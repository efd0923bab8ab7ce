"""The phase of a training step, and the transitions between phases."""

from enum import Enum


class Phase(Enum):
    """What the engine is doing."""

    IDLE = "nothing is in flight, and no averaged gradients wait for a step"
    BACKWARD = "a backward pass runs, and its gradients are exchanged"
    EXCHANGING = "backward has ended, gradients are in flight, and no optimizer has stepped"
    AVERAGED = "gradients are averaged, nothing is in flight, and no optimizer has stepped"
    STEPPING = "an optimizer hands over its updates"
    UPDATING = "an optimizer has stepped, and its updates (or another optimizer's gradients) are in flight"
    CLOSED = "the engine is closed"


class StepState:
    """The current phase. A transition that is not listed here is an error of the engine.

    The training thread makes all transitions (autograd's thread, while `backward` blocks the training thread).
    """

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self._before_step = Phase.IDLE

    @property
    def in_flight(self) -> bool:
        """Whether gradients or updates may be in flight, with no backward pass running."""
        phase = self.phase
        return phase is Phase.EXCHANGING or phase is Phase.UPDATING or phase is Phase.STEPPING

    def begin_backward(self) -> None:
        """The first gradient of a backward pass arrives; nothing is in flight."""
        self._move(Phase.BACKWARD, Phase.IDLE, Phase.AVERAGED)

    def end_backward(self) -> None:
        """All gradients of the pass have been handed to the executor."""
        self._move(Phase.EXCHANGING, Phase.BACKWARD)

    def settle(self) -> None:
        """Nothing is in flight any more. Other threads may wait, too, so this is allowed in every phase."""
        if self.phase is Phase.EXCHANGING:
            self.phase = Phase.AVERAGED
        elif self.phase is Phase.UPDATING:
            self.phase = Phase.IDLE

    def begin_step(self) -> None:
        """An optimizer starts to hand over its updates."""
        before = self.phase
        self._move(Phase.STEPPING, Phase.IDLE, Phase.EXCHANGING, Phase.AVERAGED, Phase.UPDATING)
        self._before_step = before

    def abort_step(self) -> None:
        """The optimizer's step has raised an error."""
        self._move(self._before_step, Phase.STEPPING)

    def end_step(self) -> bool:
        """All updates are handed over; True if this was the first optimizer to step since the last backward pass."""
        self._move(Phase.UPDATING, Phase.STEPPING)
        return self._before_step in (Phase.EXCHANGING, Phase.AVERAGED)

    def whole_step(self) -> bool:
        """An optimizer has stepped by itself, without handing over updates; True as for `end_step`."""
        assert self.phase not in (Phase.BACKWARD, Phase.STEPPING), f"an optimizer stepped in phase {self.phase.name}"
        if self.phase is Phase.EXCHANGING:
            self.phase = Phase.UPDATING
        elif self.phase is Phase.AVERAGED:
            self.phase = Phase.IDLE
        else:
            return False
        return True

    def close(self) -> None:
        """The engine is closed, from any phase."""
        self.phase = Phase.CLOSED

    def _move(self, to: Phase, *allowed: Phase) -> None:
        assert self.phase in allowed, f"the engine cannot go from {self.phase.name} to {to.name}"
        self.phase = to
