"""A few steps without overlap, timed: when each parameter is first used, and when its gradient is complete.

While a profile is taken, launches wait for the end of the backward pass and `step()` for all updates: compute is then
alone, and the training goes on as ever. Touches are seen by tickets that have nothing to wait for.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from syncline.engine.launch.units import Slot


class Noted:
    """A ticket that notes when its parameter is first touched."""

    marked: list[Tensor] | None = None

    def __init__(self, profile: "Profile", slot: Slot) -> None:
        self._profile, self._slot = profile, slot

    def wait(self) -> None:
        """Nothing is in flight."""
        self._profile.touched(self._slot)

    def done(self) -> bool:
        """One touch is enough."""
        return True


class Profile:
    """Marks of some steps. On CUDA they are events on the training stream, read at the end."""

    def __init__(self, device: torch.device, slots: Sequence[Slot]) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._slots = list(slots)
        self._steps: list[dict[str, Any]] = []
        self._now: dict[str, Any] = {}

    def touched(self, slot: Slot) -> None:
        """The forward pass uses a parameter for the first time."""
        self._now.setdefault(f"t{slot.index}", self._mark())
        self._now.setdefault("cpu touched", time.thread_time())

    def complete(self, slot: Slot) -> None:
        """A parameter's gradient is accumulated."""
        self._now.setdefault(f"c{slot.index}", self._mark())

    def note(self, name: str) -> None:
        """`ended` (backward), `updating`, `updated`."""
        self._now[name] = self._mark()
        self._now[f"cpu {name}"] = time.thread_time()
        self._now[f"host {name}"] = time.perf_counter()
        if name == "ended":  # of several passes, the last one
            self._now["launched"] = self._now.get("launches", 0.0)

    def issued(self) -> None:
        """All updates have been issued; what comes now is waiting."""
        self._now["host stepped"] = time.perf_counter()

    @contextmanager
    def issuing(self, what: str) -> Iterator[None]:
        """The host's time in here goes to `launches` or `updates`."""
        begin = time.perf_counter()
        yield
        self._now[what] = self._now.get(what, 0.0) + time.perf_counter() - begin

    def stepped(self) -> list[Noted]:
        """A step is over; tickets for the next one, a parameter each.

        On CUDA the next one begins when the device has nothing to do: a host that found it busy might wait for it.
        """
        if "ended" in self._now and "begun" in self._now:
            self._steps.append(self._now)
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self._now = {"begun": self._mark(), "cpu begun": time.thread_time(), "host begun": time.perf_counter()}
        return [Noted(self, slot) for slot in self._slots]

    @property
    def count(self) -> int:
        """Steps that were seen from their beginning."""
        return len(self._steps)

    def table(self) -> list[float]:
        """Medians, in seconds: data, forward, backward, update; `stretch`; the host's for passes, launches and updates;
        first uses and completions by parameter."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        rows = [self._row(step) for step in self._steps]
        return [statistics.median(column) for column in zip(*rows, strict=True)]

    def _row(self, step: dict[str, Any]) -> list[float]:
        def at(name: str, default: float) -> float:
            return self._seconds(step["begun"], step[name]) if name in step else default

        end = at("ended", 0.0)
        completions = [at(f"c{slot.index}", end) for slot in self._slots]
        first_complete = min(completions)
        touches = [at(f"t{slot.index}", -1.0) for slot in self._slots]
        seen = [t for t in touches if t >= 0] or [0.0]
        begin, last = min(seen), min(max(seen), first_complete)
        # Between the last first use and the first gradient lie a layer's forward, the loss, and a layer's backward.
        turn = last + (first_complete - last) / 3
        touches = [min(max(t, begin), turn) - begin if t >= 0 else 0.0 for t in touches]
        updating, updated = at("updating", end), at("updated", end)
        # What a second of the training thread's CPU takes: 2 where two ranks share a core.
        cpu = step["cpu ended"] - step.get("cpu touched", step["cpu begun"])
        stretch = max(1.0, (end - begin) / max(1e-9, cpu))
        updates = step.get("updates", 0.0)
        passes = step["host ended"] - step["host begun"] - step.get("launched", 0.0)
        if "host stepped" in step and "host updating" in step:
            passes += max(0.0, step["host stepped"] - step["host updating"] - updates)
        return [
            begin, turn - begin, end - turn, max(0.0, updated - updating), stretch,
            passes, step.get("launches", 0.0), updates, *touches,
            *(max(0.0, c - turn) for c in completions),
        ]  # fmt: skip

    def _mark(self) -> Any:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        return time.perf_counter()

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3) if self._cuda else float(end - start)
