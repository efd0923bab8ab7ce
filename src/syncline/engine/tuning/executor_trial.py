"""Trial of executors: the planned overlap and torch's reducer run for some steps each, and the fastest stays.

Predictions do not decide this: what separates the two on a fast network is the engine's own cost on this machine.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from syncline.plan.buckets import bucket_plans
from syncline.plan.costs import Costs
from syncline.plan.planner import WORTH
from syncline.plan.table import Plan
from syncline.plan.unit import Shape

TIMED = 4
"""Steps of each plan that are timed, after one that is not."""
HOPELESS = 0.75
"""No trial if the overlap is predicted to take less than this share of the reducer's step."""
TIE = 0.01
"""The reducer stays if it is slower by less than this share: it leaves more of the CPU to the job."""
MOST_SIZES = 2
"""How many bucket sizes are tried."""


def reducer_plans(
    overlap: Plan, step: float, shapes: Sequence[Shape], trained: Sequence[Shape], costs: Costs, codecs: Sequence[str]
) -> list[Plan]:
    """Plans for torch's reducer that may be faster than the planned overlap, which is predicted at `step` seconds.

    `codecs` are those that the reducer may use; none if another exchange is asked for.
    """
    if any(unit.exchange != "allreduce" and unit.codec in codecs for unit in overlap.units):
        return []
    found = bucket_plans(shapes, trained, costs, codecs)
    return [plan for predicted, plan in found[:MOST_SIZES] if step > HOPELESS * predicted]


@dataclass(frozen=True)
class Timed:
    """A plan and its measured step."""

    plan: Plan
    step: float


class ExecutorTrial:
    """Plans that take turns, those of the reducer first: `after_step` after every step, `add` when it gives a time.

    The overlap is tried only if it is predicted to be faster than the reducer was measured to be.
    """

    def __init__(self, plans: Sequence[Plan], overlap: Plan, predicted: float, device: torch.device) -> None:
        self._left, self._overlap, self._device = list(plans), overlap, device
        self._predicted = predicted
        self.timed: list[Timed] = []
        self._marks: list[Any] = []

    @property
    def current(self) -> Plan:
        """The plan that is to be timed now."""
        return self._left[0]

    def after_step(self) -> float | None:
        """This rank's median step under the current plan, when enough steps were timed."""
        self._marks.append(self._mark())
        if len(self._marks) <= TIMED:
            return None
        return statistics.median(map(self._seconds, self._marks, self._marks[1:]))

    def add(self, step: float) -> bool:
        """The current plan takes this long, the same number on all ranks; True if there is another plan to time."""
        done = self._left.pop(0)
        self.timed.append(Timed(done, step))
        self._marks = []
        if not self._left and done is not self._overlap and self._predicted < self._best_reducer().step * (1 - WORTH):
            self._left = [self._overlap]
        return bool(self._left)

    def fastest(self) -> tuple[Plan, str]:
        """The plan to stay with, and why."""
        best = self._best_reducer()
        overlap = next((one for one in self.timed if one.plan is self._overlap), None)
        if overlap is not None and overlap.step * (1 + TIE) < best.step:
            return (
                self._overlap,
                f"torch's reducer would take {_ms(best.step)}, and this plan takes {_ms(overlap.step)}",
            )
        other = f"takes {_ms(overlap.step)}" if overlap is not None else f"is predicted at {_ms(self._predicted)}"
        facts: dict[str, str | float] = {"measured_ms": round(best.step * 1e3, 3), "chosen": best.plan.units[0].codec}
        why = f"torch's reducer takes {_ms(best.step)} a step, and a plan that also uses the next forward pass {other}"
        return replace(best.plan, about=facts), why

    def _best_reducer(self) -> Timed:
        return min((one for one in self.timed if one.plan is not self._overlap), key=lambda one: one.step)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end) / 1e3)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
