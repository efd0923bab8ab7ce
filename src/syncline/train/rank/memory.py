"""Peak memory of a rank: allocated by torch on a GPU, resident memory of the process on the CPU."""

import re
from contextlib import suppress
from pathlib import Path

import torch

_RESET_PEAK = "5"


class PeakMemory:
    """The peak above what was in use when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._base = torch.cuda.memory_allocated(device)
        else:
            _reset_peak()
            self._base = _status("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far, such as that of the set-up. What was in use when this was made stays the base."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_peak()

    def peak(self) -> int:
        """Bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._base
        return _status("VmHWM") - self._base


def _reset_peak() -> None:
    with suppress(OSError):  # not allowed everywhere: then the peak is that of the process so far
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, field
    return int(found[1]) * 1024
