"""The phases of a step while the run goes on, for the progress message: so seldom that it costs next to nothing."""

import time
from collections.abc import Sequence

from syncline.trace import Recorder
from syncline.trace.analysis.timeline import partition
from syncline.trace.span import STEP

PHASES = ("data", "forward", "backward", "encode", "exchange and wait", "update", "other")
"""As the message has them. What of an exchange was a wait for a late rank, one rank alone cannot tell."""
SHARE = 0.003
"""Of the run's time, what looking may take."""
_OF = {"exposed_encode": "encode", "exposed_exchange": "exchange and wait", "wait": "exchange and wait"}
_START_S, _MOST_S = 0.002, 0.05  # what may be spent at the start, and at once after a long time


class Live:
    """Looks at steps if looking is paid for: time that passes pays `SHARE` of itself."""

    def __init__(self) -> None:
        self._paid, self._last, self._cost = _START_S, time.perf_counter(), 0.0

    def look(self, recorder: Recorder, steps: Sequence[int]) -> dict[int, dict[str, float]]:
        """Milliseconds by phase of finished steps of this rank, in their order; nothing where it is not paid for.

        They sum to each step's time. On CUDA the steps' events must have happened.
        """
        begin = time.perf_counter()
        self._paid = min(_MOST_S, self._paid + SHARE * (begin - self._last))
        self._last = begin
        if not steps or self._paid < self._cost:
            return {}
        # Exchanges of the step before may reach into the first.
        spans = [s for s in recorder.spans(steps[0] - 1) if s.lane != STEP or s.step >= steps[0]]
        told = {step: _told(parts) for step, parts in partition(spans).items()}
        self._cost = time.perf_counter() - begin
        self._paid -= self._cost
        return told


def _told(parts: dict[str, int]) -> dict[str, float]:
    told = dict.fromkeys(PHASES, 0.0)
    for phase, ns in parts.items():
        told[_OF.get(phase, phase)] += ns / 1e6
    return told
