"""Has a job drifted from what its plan was made for? Pure: fed with numbers that all ranks have, so all decide alike.

Step times are looked at a window at a time. The network is watched by a small probe: seen from inside, a message that
takes long may have waited for a late rank or for other messages of ours, and the engine's own times cannot tell.
"""

import math
from dataclasses import dataclass
from typing import Literal

WINDOW = 10
"""Steps between two looks at the step time."""
DRIFT = 0.3
"""A share by which the step time, or the time on the wire, must differ from what it was after planning."""
AGREE = 0.15
"""Readings that differ by no more than this share are one and the same."""
LOOKS = 2
"""Readings in a row that must be off and agree: in the first one, some steps may be from before the change."""
PROBE_SHARE = 0.001
"""Of the job's time, for probes."""
_FELT = 0.1
"""A link has drifted only if a dense exchange changes by this share of a step: no other drift is worth a plan."""
_MOST_LOOKS = 32

Cause = Literal["link", "compute"]


@dataclass(frozen=True)
class Gauge:
    """One quantity: what is usual, and the last readings as far as all of them were off."""

    usual: float | None = None
    odd: tuple[float, ...] = ()

    def read(self, now: float, *, felt: float = 0.0) -> "Gauge":
        """A reading; the first one is what is usual. It is off by more than `DRIFT`, and by more than `felt`."""
        if self.usual is None:
            return Gauge(now)
        off = abs(now - self.usual) > max(DRIFT * self.usual, felt)
        return Gauge(self.usual, (*self.odd, now) if off else ())

    def drifted(self, looks: int) -> bool:
        """Off for so many readings that agree; or for twice as many, whether they agree or not."""
        last = self.odd[-looks:]
        return len(self.odd) >= looks and (len(self.odd) >= 2 * looks or max(last) - min(last) <= AGREE * min(last))


class Drift:
    """What has been seen since the last plan. `planned`, then `look` for every window; where it says so, `probed`."""

    def __init__(self) -> None:
        self._step = self._link = Gauge()
        self._looks = LOOKS
        self._windows = 1
        """Until the next probe."""

    def planned(self, wire: float, *, same: bool = False) -> None:
        """A plan comes into use: from here on, what is usual is taken afresh; `wire` is what the probe says now.

        If it is the `same` plan as before, planning did not help: the next drift has to last twice as long.
        """
        self._looks = min(2 * self._looks, _MOST_LOOKS) if same else LOOKS
        self._step, self._link, self._windows = Gauge(), Gauge(wire), 1

    def postponed(self) -> None:
        """Something has drifted at a step where nothing can be planned: that is usual now, and looked at less often."""
        assert self._link.usual is not None
        self.planned(self._link.odd[-1] if self._link.odd else self._link.usual, same=True)

    def look(self, step: float) -> bool:
        """A window's step time; whether to probe the link now: the step has drifted, or it is time for a probe."""
        self._step = self._step.read(step)
        self._windows -= 1
        return self._step.drifted(self._looks) or self._windows <= 0

    def probed(self, wire: float, *, cost: float) -> Cause | None:
        """What has drifted, if anything: `wire` is the time of a dense exchange, `cost` the time the probe took."""
        assert self._step.usual is not None, "a probe follows a look"
        self._link = self._link.read(wire, felt=_FELT * self._step.usual)
        if self._step.drifted(self._looks):
            return "link" if self._link.odd else "compute"
        if self._link.drifted(self._looks):
            return "link"
        # One that was off is looked at again soon; else seldom enough to cost next to nothing.
        pause = math.ceil(cost / (PROBE_SHARE * WINDOW * max(self._step.usual, 1e-9)))
        self._windows = 1 if self._link.odd else max(1, pause)
        return None
