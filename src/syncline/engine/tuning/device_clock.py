"""Marks in time on the device of a model: CUDA events in the order of its stream, the host's clock on a CPU."""

import time
from typing import Any

import torch


class DeviceClock:
    """Takes marks without waiting for the device; reading the time between two marks waits for the later one."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self._device = device.type == "cuda", device

    def mark(self) -> Any:
        """The current moment; on CUDA, the moment when the device has done all work that was issued so far."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one."""
        if not self.cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end) / 1e3)
