"""Watch the errors of running codecs: samples of a few steps' gradients, averaged over the ranks without waiting.

Own gradients, averaged gradients and residuals are read at some places of each watched unit (`launch/samples.py`).
Their means over the ranks show the error of the averaged gradient, with all ranks and all codecs as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.engine.launch.samples import LaunchSamples
from syncline.engine.launch.units import UnitRun
from syncline.engine.protocols import EngineView
from syncline.engine.tuning.guard_rules import Reading
from syncline.engine.tuning.measure_errors import lost_values

STEPS = 3
"""Passes that are sampled: as many as the steps on which the planner's errors are measured."""
SAMPLES = 512
"""Places of each unit. The ranks send four numbers for each."""
_ENOUGH = 32
"""Places from which the share of lost values of a single parameter is found."""


class ErrorWatch:
    """Samples some units for `STEPS` passes. All ranks call `after_step` after the same steps, until `readings` come.

    Nobody waits: a pass has ended when the next one begins, and the sum over the ranks travels during a step.
    """

    def __init__(self, engine: EngineView, units: Sequence[UnitRun], *, jump: float) -> None:
        """`jump`: how the learning rate has changed (`GuardRules.read`); the ranks' mean is found, too."""
        self._engine, self._jump, self._passes = engine, jump, 0
        self._units = list(units)
        self._samples: list[list[LaunchSamples]] = []
        for unit in units:
            most = max(1, SAMPLES // len(unit.launches))
            steps = range(engine.step, engine.step + STEPS)
            made = [LaunchSamples(launch.batches, engine.device, most=most, steps=steps) for launch in unit.launches]
            for launch, samples in zip(unit.launches, made, strict=True):
                launch.samples = samples
            self._samples.append(made)
        self._copied: tuple[Tensor, Any] | None = None
        self._sum: tuple[Any, Tensor] | None = None

    def stop(self) -> None:
        """Sample no more passes."""
        for launch in [launch for unit in self._units for launch in unit.launches]:
            launch.samples = None

    def after_step(self) -> tuple[dict[str, Reading], float] | None:
        """A step has ended; returns the readings and the mean `jump` when they are there."""
        self._passes += 1
        if self._sum is not None:
            return self._read(*self._sum)
        if self._copied is not None:
            total, copied = self._copied
            if copied is not None:
                copied.synchronize()  # of the last step
            self._sum = dist.all_reduce(total, group=self._engine.groups.control, async_op=True), total
        elif self._passes > STEPS:
            # The next pass has settled all launches of the last one.
            self.stop()
            self._copied = self._copy()
        return None

    def _copy(self) -> tuple[Tensor, Any]:
        """All sums on the host; on CUDA they are there when the event has happened."""
        device = self._engine.device
        parts = [torch.cat([s.own, s.averaged, s.squares, s.residual]) for made in self._samples for s in made]
        flat = torch.cat([torch.tensor([self._jump]).to(device, non_blocking=True), *parts])
        if device.type == "cpu":
            return flat, None
        copied, event = flat.to("cpu", non_blocking=True), torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return copied, event

    def _read(self, work: Any, total: Tensor) -> tuple[dict[str, Reading], float]:
        with self._engine.communicating("the errors of codecs"):
            work.wait()
        means = (total / self._engine.world).double()
        jump, at = float(means[0]), 1
        readings = {}
        for unit, made in zip(self._units, self._samples, strict=True):
            own, missing, held, lost = 0.0, 0.0, 0.0, 0.0
            for samples in made:
                count = samples.count
                mean, averaged, squares, residual = means[at : at + 4 * count].split(count)
                at += 4 * count
                missed, kept, size = (mean - averaged).square(), residual.square(), mean.square()
                own, missing, held = own + float(size.sum()), missing + float(missed.sum()), held + float(kept.sum())
                # With error feedback, the window begins and ends with a residual: both are in what it misses.
                error = torch.maximum(kept, missed / 2) if unit.codec.feedback else missed
                lost = max(lost, _largest_share(error, torch.maximum(squares, size / STEPS), samples.lengths))
            if own:
                whole = max(held, missing / 2) if unit.codec.feedback else missing
                readings[unit.row.name] = Reading(whole / own, own, lost_values=lost)
        return readings, jump


def _largest_share(error: Tensor, size: Tensor, lengths: Sequence[int]) -> float:
    """The largest share of lost values of a parameter that has enough places, and of all together."""
    parts = zip(error.split(list(lengths)), size.split(list(lengths)), strict=True)
    return max(lost_values(error, size), *(lost_values(e, s) for e, s in parts if len(e) >= _ENOUGH), 0.0)
