"""`StageClock`: spans of the passes of a rank's stages, and of the time between them: waits for other stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from syncline.trace import Recorder
from syncline.trace.span import STAGES


class StageClock:
    """All stages of a rank share one, since they take turns on its training thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._since: Any = None
        """When the last pass of a running schedule ended; None outside of schedules."""
        self._passing = False

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """A schedule runs its passes: what is between them is a wait."""
        self._since = self._recorder.mark("wait")
        try:
            yield
            self._waited()
        finally:
            self._since = None

    @contextmanager
    def run(self, lane: str) -> Iterator[None]:
        """A forward or backward pass of a micro-batch; one inside another counts as a part of it."""
        outermost, self._passing = not self._passing, True
        if outermost:
            self._waited()
        try:
            with self._recorder.span(lane):
                yield
        finally:
            if outermost:
                self._passing = False
                self._since = None if self._since is None else self._recorder.mark("wait")

    def _waited(self) -> None:
        if self._since is not None:
            self._recorder.add_blocked(self._since, self._recorder.mark("wait"), unit=STAGES)
