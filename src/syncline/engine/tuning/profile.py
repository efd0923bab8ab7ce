"""Profile of a few steps without overlap: when each parameter is first used, and when its gradient is complete.

While a profile is taken, launches wait for the end of the backward pass and `step()` waits for all updates: compute is
then alone on the device, and training continues as always. `TouchTicket`s note the first use of each parameter.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from syncline.engine.launch.units import Slot
from syncline.engine.protocols import StepObserver


class TouchTicket:
    """A ticket with nothing to wait for; it notes when its parameter is first touched."""

    marked: list[Tensor] | None = None

    def __init__(self, profile: "Profile", slot: Slot) -> None:
        self._profile, self._slot = profile, slot

    def wait(self) -> None:
        """Note the touch; nothing is in flight."""
        self._profile.touched(self._slot)

    def done(self) -> bool:
        """The first touch is enough."""
        return True


@dataclass(frozen=True)
class ProfileTable:
    """Medians over the profiled steps, in seconds."""

    data: float
    forward: float
    backward: float
    update: float
    stretch: float
    """Wall seconds per CPU second of the training thread: 2 if two ranks share a core."""
    host_passes: float
    """The host's time in forward and backward passes and in `optimizer.step()`, without the next two."""
    host_launches: float
    host_updates: float
    touched: tuple[float, ...] = field(kw_only=True)
    """By parameter: first use, from the start of the forward pass."""
    complete: tuple[float, ...] = field(kw_only=True)
    """By parameter: its gradient is complete, from the start of the backward pass."""

    def numbers(self) -> list[float]:
        """All fields in one list."""
        *head, touched, complete = astuple(self)
        return [*head, *touched, *complete]

    @staticmethod
    def from_numbers(numbers: Sequence[float]) -> "ProfileTable":
        """The table that `numbers` wrote."""
        rest = tuple(numbers[8:])
        half = len(rest) // 2
        return ProfileTable(*numbers[:8], touched=rest[:half], complete=rest[half:])


@dataclass
class _Step:
    """Marks of one step: points in time on the device, seconds of the host and of the training thread's CPU."""

    begun: Any
    host_begun: float
    cpu_begun: float
    touches: dict[int, Any] = field(default_factory=dict)
    completions: dict[int, Any] = field(default_factory=dict)
    ended: Any = None
    host_ended: float = 0.0
    cpu_ended: float = 0.0
    launches_before_end: float = 0.0
    updating: Any = None
    host_updating: float = 0.0
    host_issued: float | None = None
    updated: Any = None
    launches: float = 0.0
    updates: float = 0.0


class Profile(StepObserver):
    """Observes steps; see `StepObserver`. On CUDA, marks are events on the training stream, read at the end."""

    def __init__(self, device: torch.device, slots: Sequence[Slot]) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._slots = list(slots)
        self._steps: list[_Step] = []
        self._now = self._begin()

    def touched(self, slot: Slot) -> None:
        """The forward pass uses a parameter for the first time."""
        if not self._now.touches:
            self._now.cpu_begun = time.thread_time()
        self._now.touches.setdefault(slot.index, self._mark())

    def gradient_complete(self, slot: Slot) -> None:
        self._now.completions.setdefault(slot.index, self._mark())

    def backward_ended(self) -> None:
        # Of several passes, the last one counts.
        self._now.ended = self._mark()
        self._now.host_ended, self._now.cpu_ended = time.perf_counter(), time.thread_time()
        self._now.launches_before_end = self._now.launches

    @contextmanager
    def issuing_launches(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._now.launches += time.perf_counter() - begin

    def updates_begin(self) -> None:
        self._now.updating, self._now.host_updating = self._mark(), time.perf_counter()

    @contextmanager
    def issuing_update(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._now.updates += time.perf_counter() - begin

    def updates_issued(self) -> None:
        self._now.host_issued = time.perf_counter()

    def updates_done(self) -> None:
        self._now.updated = self._mark()

    def next_step(self) -> list[TouchTicket]:
        """End a step and begin the next one; returns a ticket for each parameter.

        On CUDA the next step begins when the device is idle: the host could have to wait for a busy one.
        """
        if self._now.ended is not None:
            self._steps.append(self._now)
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self._now = self._begin()
        return [TouchTicket(self, slot) for slot in self._slots]

    @property
    def under_way(self) -> bool:
        """Whether the present step has had its backward pass."""
        return self._now.ended is not None

    @property
    def count(self) -> int:
        """Number of complete steps."""
        return len(self._steps)

    def table(self) -> ProfileTable:
        """Medians over all complete steps."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        rows = [self._row(step).numbers() for step in self._steps]
        return ProfileTable.from_numbers([statistics.median(column) for column in zip(*rows, strict=True)])

    def _row(self, step: _Step) -> ProfileTable:
        def at(mark: Any, default: float) -> float:
            return default if mark is None else self._seconds(step.begun, mark)

        end = at(step.ended, 0.0)
        completions = [at(step.completions.get(slot.index), end) for slot in self._slots]
        first_complete = min(completions)
        touches = [at(step.touches.get(slot.index), -1.0) for slot in self._slots]
        seen = [t for t in touches if t >= 0] or [0.0]
        begin, last = min(seen), min(max(seen), first_complete)
        # Between the last first use and the first gradient are a layer's forward, the loss, and a layer's backward.
        turn = last + (first_complete - last) / 3
        passes = step.host_ended - step.host_begun - step.launches_before_end
        if step.host_issued is not None and step.updating is not None:
            passes += max(0.0, step.host_issued - step.host_updating - step.updates)
        return ProfileTable(
            data=begin,
            forward=turn - begin,
            backward=end - turn,
            update=max(0.0, at(step.updated, end) - at(step.updating, end)),
            stretch=max(1.0, (end - begin) / max(1e-9, step.cpu_ended - step.cpu_begun)),
            host_passes=passes,
            host_launches=step.launches,
            host_updates=step.updates,
            touched=tuple(min(max(t, begin), turn) - begin if t >= 0 else 0.0 for t in touches),
            complete=tuple(max(0.0, c - turn) for c in completions),
        )

    def _begin(self) -> _Step:
        return _Step(self._mark(), time.perf_counter(), time.thread_time())

    def _mark(self) -> Any:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        return time.perf_counter()

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3) if self._cuda else float(end - start)
