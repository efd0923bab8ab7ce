"""Profiling mode: an executor that runs the parts of a step one after the other and reports them to an observer."""

from collections.abc import Callable, Sequence

from syncline.engine.launch.units import UnitRun
from syncline.engine.protocols import Executor, StepObserver, Ticket


class SerialExecutor:
    """Wraps another executor: launches wait for the end of backward, updates for all gradients, `step()` for updates.

    So compute runs alone and can be timed, while training continues with the same results.
    """

    def __init__(self, inner: Executor, observer: StepObserver, wait: Callable[[], None]) -> None:
        self.inner, self._observer, self._wait = inner, observer, wait
        self.recorder, self.lanes = inner.recorder, inner.lanes
        self.begin, self.exchanged, self.watch = inner.begin, inner.exchanged, inner.watch
        self.fail, self.close = inner.fail, inner.close
        self._held: list[UnitRun] = []

    @property
    def failure(self) -> BaseException | None:
        """The error of the wrapped executor."""
        return self.inner.failure

    def ready(self, unit: UnitRun) -> None:
        """Hold the unit back until the end of backward."""
        self._held.append(unit)

    def end_backward(self) -> None:
        """Launch all units."""
        self._observer.backward_ended()
        held, self._held = self._held, []
        with self._observer.issuing_launches():
            for unit in held:
                self.inner.ready(unit)
        self.inner.end_backward()

    def begin_updates(self, units: Sequence[UnitRun]) -> None:
        """Wait for all averaged gradients first."""
        for unit in units:
            exchanged = self.inner.exchanged(unit)
            assert exchanged is not None
            exchanged.wait()
        self._observer.updates_begin()
        self.inner.begin_updates(units)

    def after(self, unit: UnitRun | None, work: Callable[[], None]) -> Ticket:
        """Hand an update over; the time that this takes is noted."""
        with self._observer.issuing_update():
            return self.inner.after(unit, work)

    def end_updates(self) -> None:
        """Wait for all updates."""
        self.inner.end_updates()
        self._observer.updates_issued()
        self._wait()
        self._observer.updates_done()
