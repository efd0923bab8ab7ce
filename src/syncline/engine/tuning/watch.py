"""Watch of running steps: how long they take, and how much of that another plan could hide. It slows nothing down.

Steps under torch's reducer show what is exposed: the wait for the network between the last gradient and the update.
Nothing that another plan does can save more than that, so the tuner stops early where it is small.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from syncline.engine.protocols import EngineView
from syncline.engine.tuning.device_clock import DeviceClock
from syncline.stats import median


@dataclass(frozen=True)
class Seen:
    """Seconds of watched steps, the same on all ranks."""

    step: float
    passes: float = 0.0
    """From the start of the backward pass to the last averaged gradient."""
    exposed: float = 0.0
    """The part of `passes` after the backward pass's own work; of the rank that waits least, the others wait for it."""
    waiting: float = 0.0
    """The part of `exposed` in which the network was waited for; on a CPU, cores work on the exchange in the rest."""
    arrival: tuple[float, ...] = ()
    """By parameter: its place in the order in which gradients get complete."""

    def gain(self, *, smaller: bool) -> float:
        """Seconds that another plan could save at most; `smaller`: it may send fewer bytes.

        The same bytes can only be hidden behind the rest of the step.
        """
        return max(0.0, self.waiting if smaller else min(self.waiting, self.step - self.passes))


class Watch:
    """Observes the steps of one plan: `pass_begins` and so on in a backward pass, `after_step` after each step."""

    def __init__(self, device: torch.device, parameters: Sequence[Tensor], *, skip: int) -> None:
        """`skip`: the number of first steps that do not count."""
        self._clock, self._skip = DeviceClock(device), skip
        self._places = {id(p): place for place, p in enumerate(parameters)}
        self._steps: list[Any] = []
        self._passes: list[tuple[Any, Any, Any]] = []
        self._pass: list[Any] = []
        self._working: list[float] = []
        """By pass, on a CPU: seconds after its own work in which this process worked, as long as they take here."""
        self._cpu = self._stretch = 0.0
        self._arrival: list[float] = []
        if not skip:
            self.after_step()

    def pass_begins(self) -> None:
        """A backward pass begins that will be averaged."""
        self._pass = [self._clock.mark()]
        self._cpu = time.thread_time()

    def pass_computed(self, fired: Sequence[Tensor]) -> None:
        """Its own work has been issued; gradients of these parameters were complete in this order."""
        self._pass.append(self._clock.mark())
        if not self._clock.cuda:
            # Wall seconds per CPU second: 2 if two ranks, or other programs, share a core with this one.
            self._stretch = max(1.0, (self._pass[1] - self._pass[0]) / max(1e-9, time.thread_time() - self._cpu))
            self._cpu = time.process_time()
        if not self._arrival:
            self._arrival = [float(len(self._places))] * len(self._places)
            for order, parameter in enumerate(fired):
                place = self._places.get(id(parameter))
                if place is not None:
                    self._arrival[place] = float(order)

    def pass_averaged(self) -> None:
        """Its gradients are averaged."""
        if len(self._pass) == 2 and self.count >= 0:
            self._passes.append((self._pass[0], self._pass[1], self._clock.mark()))
            self._working.append(0.0 if self._clock.cuda else self._stretch * (time.process_time() - self._cpu))

    @property
    def count(self) -> int:
        """Number of steps that count so far; below 0 while steps are skipped."""
        return len(self._steps) - 1

    def after_step(self) -> None:
        """A step has ended."""
        self._skip = max(0, self._skip - 1)
        if not self._skip:
            self._steps.append(self._clock.mark())

    def seen(self, engine: EngineView) -> Seen:
        """What was seen so far on all ranks, which call this together."""
        seconds = self._clock.seconds
        step = median([seconds(a, b) for a, b in pairwise(self._steps)])
        passes = median([seconds(a, c) for a, _, c in self._passes]) if self._passes else 0.0
        exposed = median([seconds(b, c) for _, b, c in self._passes]) if self._passes else 0.0
        waiting = max(0.0, exposed - median(self._working)) if self._passes else 0.0
        arrival = self._arrival or [0.0] * len(self._places)
        mine = torch.tensor([step, passes, exposed, waiting, *arrival], dtype=torch.float64)
        rows: Tensor = engine.groups.gather(mine)
        means: list[float] = rows.mean(0).tolist()
        least: list[float] = rows.amin(0).tolist()
        return Seen(means[0], means[1], least[2], least[3], tuple(means[4:]))
