"""Watch of running steps: how long they take, and how much of that another plan could hide. It slows nothing down.

Steps under torch's reducer show what is exposed: the wait for the network between the last gradient and the update.
Nothing that another plan does can save more than that, so the tuner stops early where it is small.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from syncline.engine.protocols import EngineView
from syncline.engine.tuning.device_clock import DeviceClock
from syncline.stats import median
from syncline.trace.record.cpu_time import idle_core_seconds


@dataclass(frozen=True)
class Seen:
    """Seconds of watched steps, the same on all ranks."""

    step: float
    passes: float = 0.0
    """From the start of the backward pass to the last averaged gradient."""
    exposed: float = 0.0
    """The part of `passes` after the backward pass's own work; of the rank that waits least, the others wait for it."""
    idle: float = math.inf
    """Seconds of a step in which the machine's cores had nothing to do; unlimited where they do not matter."""
    arrival: tuple[float, ...] = ()
    """By parameter: its place in the order in which gradients get complete."""

    def gain(self, *, smaller: bool) -> float:
        """Seconds that another plan could save at most; `smaller`: it may send fewer bytes.

        The same bytes can only be hidden behind the rest of the step, and only by cores that are free.
        """
        hidden = self.exposed if smaller else min(self.exposed, self.step - self.passes)
        return max(0.0, min(hidden, self.idle))


class Watch:
    """Observes the steps of one plan: `pass_begins` and so on in a backward pass, `after_step` after each step."""

    def __init__(self, device: torch.device, parameters: Sequence[Tensor], *, skip: int) -> None:
        """`skip`: the number of first steps that do not count."""
        self._clock, self._skip = DeviceClock(device), skip
        self._places = {id(p): place for place, p in enumerate(parameters)}
        self._steps: list[Any] = []
        self._passes: list[tuple[Any, Any, Any]] = []
        self._pass: list[Any] = []
        self._arrival: list[float] = []
        self._idle: list[float | None] = []
        """Idle seconds of the machine's cores at the same moments as `_steps`."""
        if not skip:
            self._mark_step()

    def pass_begins(self) -> None:
        """A backward pass begins that will be averaged."""
        self._pass = [self._clock.mark()]

    def pass_computed(self, fired: Sequence[Tensor]) -> None:
        """Its own work has been issued; gradients of these parameters were complete in this order."""
        self._pass.append(self._clock.mark())
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

    @property
    def count(self) -> int:
        """Number of steps that count so far; below 0 while steps are skipped."""
        return len(self._steps) - 1

    def after_step(self) -> None:
        """A step has ended."""
        self._skip = max(0, self._skip - 1)
        if not self._skip:
            self._mark_step()

    def _mark_step(self) -> None:
        self._steps.append(self._clock.mark())
        self._idle.append(None if self._clock.cuda else idle_core_seconds())

    def seen(self, engine: EngineView) -> Seen:
        """What was seen so far on all ranks, which call this together."""
        seconds = self._clock.seconds
        step = median([seconds(a, b) for a, b in pairwise(self._steps)])
        passes = median([seconds(a, c) for a, _, c in self._passes]) if self._passes else 0.0
        exposed = median([seconds(b, c) for _, b, c in self._passes]) if self._passes else 0.0
        first, last = self._idle[0], self._idle[-1]
        idle = math.inf if first is None or last is None else (last - first) / self.count
        arrival = self._arrival or [0.0] * len(self._places)
        mine = torch.tensor([step, passes, exposed, idle, *arrival], dtype=torch.float64)
        rows: Tensor = engine.groups.gather(mine)
        means: list[float] = rows.mean(0).tolist()
        return Seen(means[0], means[1], float(rows[:, 2].min()), means[3], tuple(means[4:]))
