"""`RankClock`: the seconds since a mark on the slowest rank, so that all ranks decide alike by what they time."""

from typing import Any

import torch
import torch.distributed as dist

from syncline.engine.tuning.device_clock import DeviceClock
from syncline.pipeline.mesh import message_device


class RankClock:
    """A `DeviceClock` that all ranks of the job read together."""

    def __init__(self, clock: DeviceClock, device: torch.device) -> None:
        self._clock, self._device = clock, device

    def mark(self) -> Any:
        """The current moment on this rank's device."""
        return self._clock.mark()

    def seconds_since(self, mark: Any) -> float:
        """Seconds from a mark until now, on the slowest rank. All ranks call it."""
        took = torch.tensor(self._clock.seconds(mark, self._clock.mark()), dtype=torch.float64)
        took = took.to(message_device(self._device))
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)
