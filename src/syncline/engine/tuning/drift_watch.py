"""`DriftWatch`: step times and network of a running job, measured on all ranks for the detection of drift.

`drift.py` decides by these numbers. They are the same on all ranks, which call the methods here at the same steps.
"""

import statistics
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.engine.protocols import EngineView
from syncline.engine.tuning.drift import WINDOW, Cause, Drift
from syncline.engine.tuning.measure_costs import dense_link, mean_over_ranks
from syncline.engine.tuning.probe_link import WATCH_BYTES, message_seconds

_FAST_S, _MANY = 5e-3, 8
"""If a message of the network's probe takes less than so many seconds, this many messages are timed."""


class DriftWatch:
    """Times the steps of the plan in use, and probes the network between them."""

    def __init__(self, engine: EngineView) -> None:
        self._engine, self._drift = engine, Drift()
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._last_step_at = 0.0
        """When the last step ended; 0 if what follows it is not a whole step."""
        self._pending_mean: tuple[Any, Tensor] | None = None
        """An all-reduce of the step times, and its tensor."""
        self.network, self._last_hash = 0.0, ""
        """Seconds of a dense exchange, and the plan's hash, when the last plan was found."""

    def planned(self, plan_hash: str, network: float) -> None:
        """A plan was found, and a dense exchange takes `network` seconds now."""
        self.restart()
        self.network = network
        self._drift.planned(network, same=plan_hash == self._last_hash)
        self._last_hash = plan_hash

    def codecs_changed(self) -> None:
        """The plan has other codecs: a step takes another time now."""
        self._drift.planned(self.network)
        self.restart()

    def expect(self, step: float) -> None:
        """The step time of the plan is known from an earlier run."""
        self._drift.expect(step)

    def postpone(self) -> None:
        """There is drift, but nothing can be planned at this step."""
        self._drift.postpone()

    def restart(self) -> None:
        """Forget the times of the last steps."""
        self._times.clear()
        self._last_step_at = 0.0

    def step_ended(self) -> float | None:
        """A step has ended; returns its seconds, None for the first one."""
        last, self._last_step_at = self._last_step_at, time.perf_counter()
        if not last:
            return None
        self._times.append(self._last_step_at - last)
        return self._times[-1]

    @property
    def oldest(self) -> float:
        """Seconds of the oldest step that is remembered."""
        return self._times[0]

    def start_mean(self) -> None:
        """Start to average the window's step time over all ranks, if enough steps were timed."""
        if len(self._times) >= WINDOW // 2:
            # The result is read one step later, so that nobody waits for it.
            mine = torch.tensor([statistics.median(self._times)], dtype=torch.float64)
            self._pending_mean = dist.all_reduce(mine, group=self._engine.groups.control, async_op=True), mine

    def mean(self) -> float | None:
        """The mean that was started a step ago; None if there is none."""
        if self._pending_mean is None:
            return None
        (work, total), self._pending_mean = self._pending_mean, None
        with self._engine.communicating("the step times"):
            work.wait()
        return float(total) / self._engine.world

    def add_window(self, step: float) -> bool:
        """Add a window's step time; returns whether to probe the network now."""
        return self._drift.add_window(step)

    def probe(self) -> Cause | None:
        """What has drifted. Nothing else of this job is in flight; waiting for that is a part of the probe's cost."""
        engine = self._engine
        begin, mark = time.perf_counter(), engine.recorder.mark("update")
        engine.wait()
        network, cost = mean_over_ranks(engine, [_dense_seconds(engine), time.perf_counter() - begin])
        engine.recorder.add("update", "probe", mark, engine.recorder.mark("update"))
        self._last_step_at = 0.0  # the probe is not a part of a step
        return self._drift.add_probe(network, cost=cost)


def network_seconds(engine: EngineView) -> float:
    """Seconds of a dense exchange of all gradients, measured now; the same on all ranks."""
    (seconds,) = mean_over_ranks(engine, [_dense_seconds(engine)])
    if seconds < _FAST_S * _messages(engine):
        # On a fast network the noise of the machine is large, and messages are cheap.
        (again,) = mean_over_ranks(engine, [_dense_seconds(engine, messages=_MANY)])
        return min(seconds, again)
    return seconds


def _dense_seconds(engine: EngineView, *, messages: int = 2) -> float:
    """The same, as this rank measures it."""
    return message_seconds(dense_link(engine), engine.device, messages=messages) * _messages(engine)


def _messages(engine: EngineView) -> float:
    """All gradients, in messages of the probe."""
    return sum(shape.nbytes for shape in engine.shapes) / WATCH_BYTES
