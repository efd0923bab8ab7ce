"""Timing on the CPU and on CUDA: warm-up, repetitions, median and spread."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

# 4096**3 products in float32: some milliseconds of a large GPU's time.
_PLUG, _PLUGS = 4096, 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the repetitions: median, quartiles, how many; `issue` is what the host was held up."""

    median: float
    low: float
    high: float
    repetitions: int
    issue: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return asdict(self)


def summarize(samples: Sequence[float]) -> Timing:
    """Median and quartiles of times in milliseconds."""
    if len(samples) < 2:
        only = samples[0]
        return Timing(only, only, only, 1)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, low, high, len(samples))


class Clock:
    """Marks in time on one device: events on CUDA, which are read at the end alone; the clock on the CPU.

    On CUDA the time between marks is the device's: `plug` keeps it busy while the host issues what is timed, as
    training does, so that launch gaps are not counted. What the host needs to issue it is told apart.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._plug = torch.ones(_PLUG, _PLUG, device=device) if self.cuda else None

    def plug(self) -> None:
        """Milliseconds of other work for the device, so that the host can run ahead; nothing on the CPU."""
        if self._plug is not None:
            for _ in range(_PLUGS):
                torch.mm(self._plug, self._plug)

    def mark(self) -> Any:
        """Now, in the device's order of work."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Milliseconds from one mark to a later one."""
        if not self.cuda:
            return float(last - first) * 1e3
        last.synchronize()
        return float(first.elapsed_time(last))

    def time(self, calls: Sequence[Callable[[], object]], *, budget_s: float = 0.5, most: int = 50) -> Timing:
        """Time calls in turn (equal work on unlike memory, so that no cache holds it) until the budget is spent."""
        for call in calls[:2]:
            call()
        if self.cuda:
            torch.cuda.synchronize()
        marks: list[tuple[Any, Any]] = []
        began = time.perf_counter()
        issue: list[float] = []
        while len(marks) < 3 or (len(marks) < most and time.perf_counter() - began < budget_s):
            self.plug()
            first = self.mark()
            at = time.perf_counter()
            calls[len(marks) % len(calls)]()
            issue.append((time.perf_counter() - at) * 1e3)
            marks.append((first, self.mark()))
            if self.cuda:
                torch.cuda.synchronize()  # else plugs pile up, and the budget would count launches, not work
        return replace(summarize([self.between(a, b) for a, b in marks]), issue=statistics.median(issue))


def copy_time(device: torch.device, sources: Sequence[torch.Tensor], **limits: Any) -> Timing:
    """What a copy of these tensors takes: the yardstick of everything else."""
    targets = [torch.empty_like(s) for s in sources]
    pairs = zip(targets, sources, strict=True)
    return Clock(device).time([partial(t.copy_, s) for t, s in pairs], **limits)


def inputs(count: int, device: torch.device, *, spread_bytes: int = 1 << 28, most: int = 8) -> list[torch.Tensor]:
    """Random float32 tensors, so many that together they are larger than a cache."""
    copies = max(1, min(most, spread_bytes // max(1, 4 * count)))
    generator = torch.Generator(device=device).manual_seed(0)
    return [torch.randn(count, device=device, generator=generator) for _ in range(copies)]


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "device": str(name), "threads": torch.get_num_threads()}
