"""Drift detection: decides when the step time or the network has changed so much that a new plan is needed.

Pure: it gets numbers that all ranks share, so all ranks decide alike. Step times are compared one window at a time. The
network is watched by a small probe, because the engine's own times cannot show it: a slow message may have waited for a
late rank, or for other messages of this job.
"""

import math
from dataclasses import dataclass
from typing import Literal

WINDOW = 10
"""Steps between two comparisons of the step time."""
DRIFT = 0.3
"""Relative change of the step time, or of the time on the network, that counts as drift."""
AGREE = 0.15
"""Readings within this relative difference agree."""
READINGS = 2
"""Outliers in a row that must agree; the first may contain steps from before the change."""
PROBE_SHARE = 0.001
"""Fraction of the job's time that probes may take."""
_MATTERS = 0.1
"""The network has drifted only if a dense exchange changes by this fraction of a step; less is not worth a plan."""
_MOST_READINGS = 32

Cause = Literal["link", "compute"]


@dataclass(frozen=True)
class Gauge:
    """One quantity: its baseline, and the latest readings since the last normal one."""

    baseline: float | None = None
    outliers: tuple[float, ...] = ()

    def read(self, value: float, *, tolerance: float = 0.0) -> "Gauge":
        """Add a reading. The first is the baseline; an outlier differs by more than `DRIFT` and `tolerance`."""
        if self.baseline is None:
            return Gauge(value)
        is_outlier = abs(value - self.baseline) > max(DRIFT * self.baseline, tolerance)
        return Gauge(self.baseline, (*self.outliers, value) if is_outlier else ())

    def drifted(self, readings: int) -> bool:
        """Whether the last `readings` outliers agree, or there are twice as many."""
        last = self.outliers[-readings:]
        if len(self.outliers) < readings:
            return False
        return len(self.outliers) >= 2 * readings or max(last) - min(last) <= AGREE * min(last)


class Drift:
    """Readings since the last plan: `planned`, then `add_window` for every window, and `add_probe` if it says so."""

    def __init__(self) -> None:
        self._step = self._network = Gauge()
        self._readings = READINGS
        self._windows_to_probe = 1

    def planned(self, network: float, *, same: bool = False) -> None:
        """A new plan starts with new baselines; `network` is the probe's current time of a dense exchange.

        If the plan is the `same` as before, planning did not help: the next drift must last twice as long.
        """
        self._readings = min(2 * self._readings, _MOST_READINGS) if same else READINGS
        self._step, self._network, self._windows_to_probe = Gauge(), Gauge(network), 1

    def expect(self, step: float) -> None:
        """The step time of the plan is known from an earlier run: it is the baseline, not that of the first window."""
        self._step = Gauge(step)

    def postpone(self) -> None:
        """There is drift, but nothing can be planned at this step: take it as the baseline and check less often."""
        assert self._network.baseline is not None
        self.planned(self._network.outliers[-1] if self._network.outliers else self._network.baseline, same=True)

    def add_window(self, step: float) -> bool:
        """Add a window's step time; returns whether to probe the network now."""
        self._step = self._step.read(step)
        self._windows_to_probe -= 1
        return self._step.drifted(self._readings) or self._windows_to_probe <= 0

    def add_probe(self, network: float, *, cost: float) -> Cause | None:
        """Add a probe's time of a dense exchange (the probe took `cost` seconds); returns what has drifted, if any."""
        assert self._step.baseline is not None, "a probe follows a window"
        self._network = self._network.read(network, tolerance=_MATTERS * self._step.baseline)
        if self._step.drifted(self._readings):
            return "link" if self._network.outliers else "compute"
        if self._network.drifted(self._readings):
            return "link"
        # Check an outlier again soon; otherwise probe so rarely that it costs next to nothing.
        pause = math.ceil(cost / (PROBE_SHARE * WINDOW * max(self._step.baseline, 1e-9)))
        self._windows_to_probe = 1 if self._network.outliers else max(1, pause)
        return None
