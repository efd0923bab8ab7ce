"""`ProfiledSteps`: some steps of the job without overlap, with their times and gradients for a new plan."""

from collections.abc import Sequence

from syncline.engine.protocols import TunableEngine
from syncline.engine.tuning.measure_errors import GradientHistory
from syncline.engine.tuning.profile import Profile
from syncline.plan.errors import Errors


class ProfiledSteps:
    """Profiles the next steps of an engine, from now until `complete`."""

    def __init__(self, engine: TunableEngine, steps: int, *, keep_gradients: bool) -> None:
        """`keep_gradients`: the errors of codecs will be measured on them."""
        self._engine, self._steps = engine, steps
        self.profile = Profile(engine.device, engine.slots)
        self._history = GradientHistory(engine) if keep_gradients else None
        engine.profile(self.profile)
        self.after_step()

    @property
    def complete(self) -> bool:
        """Whether all steps were profiled; the engine is back to normal then."""
        return self.profile.count >= self._steps

    def after_step(self) -> None:
        """A step has ended: begin the next one, or end the profile."""
        engine = self._engine
        engine.wait()
        if self._history is not None and self.profile.under_way:
            self._history.add()
        tickets = self.profile.next_step()
        if self.complete:
            engine.profile(None)
        elif not engine.compiled:
            engine.observe_touches(tickets)

    def measure_errors(self, specs: Sequence[str]) -> Errors | None:
        """What these codecs lose on the gradients, which are dropped; None if none were kept. All ranks call this."""
        return None if self._history is None else self._history.measure(self._engine, specs)
