"""Timing on the CPU and on CUDA: clock, warm-up, repetitions, median and quartiles, ratios of paired times."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict

import torch

from syncline.stats import median, quantile

# Matrix products that keep a large GPU busy for some milliseconds: their size and number.
_FILLER_SIZE, _FILLERS = 4096, 3


class Timing(TypedDict):
    """Milliseconds: median, quartiles, number of repetitions, and the host time to issue the work (`issue`)."""

    median: float
    low: float
    high: float
    repetitions: int
    issue: float | None


def summarize(samples: Sequence[float], *, issue: float | None = None) -> Timing:
    """Median and quartiles of times in milliseconds."""
    low, high = quantile(samples, 0.25), quantile(samples, 0.75)
    return {"median": median(samples), "low": low, "high": high, "repetitions": len(samples), "issue": issue}


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios of times that were measured in the same round, so that a drift of the machine cancels."""
    return [a / b for a, b in zip(mine, others, strict=True)]


class Clock:
    """Marks in time on one device: events on CUDA (read only at the end), the host's clock on the CPU.

    On CUDA the time between marks is device time: `keep_busy` occupies the device while the host issues the work, as
    training does, so that gaps between launches are not counted. The host time is measured separately.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._filler = torch.ones(_FILLER_SIZE, _FILLER_SIZE, device=device) if self.cuda else None

    def keep_busy(self) -> None:
        """Give the device milliseconds of other work, so that the host can run ahead. Does nothing on the CPU."""
        if self._filler is not None:
            for _ in range(_FILLERS):
                torch.mm(self._filler, self._filler)

    def mark(self) -> Any:
        """The current moment in the device's order of work."""
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
        """Time the calls in rotation until the budget is spent: equal work on different memory, so no cache helps."""
        for call in calls[:2]:
            call()
        if self.cuda:
            torch.cuda.synchronize()
        marks: list[tuple[Any, Any]] = []
        began = time.perf_counter()
        issue: list[float] = []
        while len(marks) < 3 or (len(marks) < most and time.perf_counter() - began < budget_s):
            self.keep_busy()
            first = self.mark()
            at = time.perf_counter()
            calls[len(marks) % len(calls)]()
            issue.append((time.perf_counter() - at) * 1e3)
            marks.append((first, self.mark()))
            if self.cuda:
                torch.cuda.synchronize()  # else work piles up, and the budget would count launches only
        return summarize([self.between(a, b) for a, b in marks], issue=median(issue))


def copy_time(device: torch.device, sources: Sequence[torch.Tensor], **limits: Any) -> Timing:
    """Time of a copy of these tensors: the reference for all other times."""
    targets = [torch.empty_like(s) for s in sources]
    pairs = zip(targets, sources, strict=True)
    return Clock(device).time([partial(t.copy_, s) for t, s in pairs], **limits)


def inputs(shape: Sequence[int], device: torch.device, *, most: int = 8) -> list[torch.Tensor]:
    """Random float32 tensors, enough of them to be larger than the cache together."""
    copies = max(1, min(most, (1 << 28) // max(1, 4 * math.prod(shape))))
    generator = torch.Generator(device=device).manual_seed(0)
    return [torch.randn(shape, device=device, generator=generator) for _ in range(copies)]
