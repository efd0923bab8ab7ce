"""Rules of the guard: when units step back to better codecs, and when they may come forward again.

Pure: it gets readings that all ranks share, so all ranks decide alike. A unit that has stepped back is measured again
after a number of checks that doubles every time, so the guard cannot oscillate.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from syncline.plan.errors import Budget

SURE = 2.0
"""A reading beyond this many times a limit counts at once; one beyond the limit counts if the next one is, too."""
NORM_CHANGE = 5.0
"""A critical phase: the norm of a unit's gradients has changed by this factor since the last reading..."""
RATE_CHANGE = 1.9
"""...or the learning rate by this one from one step to the next. A schedule that falls slowly is no such phase."""
PATIENCE = 2
"""Checks that a unit waits, at least, before it is measured again. It doubles with every step back."""


@dataclass(frozen=True)
class Reading:
    """What a few steps have shown of a unit."""

    error: float
    """What is missing in its averaged gradients, relative to the sum of these steps; squared. A residual that grows
    makes it grow."""
    energy: float = 1.0
    """The squared norm of the sum of gradients, at the places that were read."""
    lost_values: float = 0.0
    """The largest share of a parameter's values that are lost, as `CodecError` counts it."""


@dataclass(frozen=True)
class GuardedUnit:
    """A unit with a lossy codec."""

    weight: float
    """Its share of the energy of all gradients."""
    error: float
    """The last known error: planned, or read; 0 after a step back, until it is read again."""
    lost_values: float = 0.0
    """The last share of lost values that was read."""
    over: int = 0
    """Readings in a row beyond the limit."""
    energy: float | None = None
    """The energy in the last reading."""
    back: bool = False
    wait: int = 0
    """If it has stepped back: checks until it is measured again."""


class GuardRules:
    """The units of a plan: `planned`, then `read` and `due` at every check, and `measured` for units that were due."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.units: dict[str, GuardedUnit] = {}
        self._patience: dict[str, int] = {}
        """By unit, also of earlier plans: checks to wait after the next step back."""
        self.seen = 0.0
        """The error of all gradients after the last `read`, with the units that stepped back because of it."""
        self._total_over = 0

    def planned(
        self, units: Mapping[str, tuple[float, float]], *, verified: bool = True, later: Collection[str] = ()
    ) -> None:
        """A plan with these lossy units, by name: (weight, planned error).

        `verified=False`: the errors are those of an earlier run, so all units step back until they are measured.
        `later`: units whose errors could not be measured yet, so they have stepped back already.
        """
        self.units = {
            name: GuardedUnit(weight, error if verified else 0.0, back=not verified)
            for name, (weight, error) in units.items()
        }
        for name in later:
            self.units[name] = GuardedUnit(0.0, 0.0)
            self._step_back(name)
        self._total_over = 0

    @property
    def forward(self) -> list[str]:
        """Units that use their lossy codec."""
        return [name for name, unit in self.units.items() if not unit.back]

    @property
    def total(self) -> float:
        """The error of all gradients together, as far as it is known."""
        return sum(unit.weight * unit.error for unit in self.units.values())

    def suspects(self) -> list[str]:
        """Units to read next: those whose last reading was beyond a limit."""
        return [name for name in self.forward if self.units[name].over]

    def read(self, readings: Mapping[str, Reading], *, jump: float = 1.0) -> dict[str, str]:
        """Add readings; returns the units that step back now, each with the reason.

        `jump`: the largest factor by which the learning rate has changed from a step to the next since the last check.
        """
        back: dict[str, str] = {}
        for name, reading in readings.items():
            unit = self.units.get(name)
            if unit is None or not _finite(reading):
                continue
            # One that has stepped back is read if its codec loses something still.
            if why := self._why_back(unit, reading):
                back[name] = why
            self.units[name] = replace(
                unit,
                error=reading.error,
                lost_values=reading.lost_values,
                over=unit.over + 1 if self._beyond(reading) and not unit.back else 0,
                energy=None if unit.back else reading.energy,
            )
        back |= {name: why for name, why in self._over_total().items() if name not in back}
        if math.isfinite(jump) and jump >= RATE_CHANGE:
            why = f"the learning rate changed by a factor of {jump:.2g} in one step"
            back |= {name: why for name in self.forward if name not in back}
        for name in back:
            self._step_back(name)
        return back

    def _why_back(self, unit: GuardedUnit, reading: Reading) -> str:
        if self._beyond(reading, SURE if not (unit.over or unit.back) else 1.0):
            if reading.error > self.budget.unit:
                return f"its error is {reading.error:.2g}, and a unit may lose {self.budget.unit:.2g}"
            return f"{reading.lost_values:.0%} of its values are lost, and {self.budget.values:.0%} may be"
        if unit.energy and reading.energy and factor(reading.energy, unit.energy) >= NORM_CHANGE**2:
            return f"its gradient's norm changed by a factor of {math.sqrt(reading.energy / unit.energy):.2g}"
        return ""

    def _beyond(self, reading: Reading, times: float = 1.0) -> bool:
        """Whether a reading is beyond one of the limits of a unit, multiplied by a factor."""
        values = min(times * self.budget.values, (1 + self.budget.values) / 2)  # all that can be lost is 1
        return reading.error > times * self.budget.unit or reading.lost_values > values

    def _over_total(self) -> dict[str, str]:
        """The units with the largest part in a total error that is beyond the budget; none while it may be noise."""
        total, limit = self.total, self.budget.error
        self.seen = total
        self._total_over = self._total_over + 1 if total > limit else 0
        if total <= limit * (SURE if self._total_over < 2 else 1.0):
            return {}
        why = f"the error of all gradients is {total:.2g}, and the budget {limit:.2g}"
        found: dict[str, str] = {}
        for name in sorted(self.units, key=lambda n: -self.units[n].weight * self.units[n].error):
            if total <= limit:
                break
            found[name] = why
            total -= self.units[name].weight * self.units[name].error
        return found

    def _step_back(self, name: str) -> None:
        wait = self._patience.get(name, PATIENCE)
        self._patience[name] = 2 * wait
        self.units[name] = replace(self.units[name], back=True, wait=wait, over=0, energy=None, error=0.0)

    def due(self) -> list[str]:
        """A check: returns the units that have stepped back and are to be measured now."""
        for name, unit in self.units.items():
            if unit.back:
                self.units[name] = replace(unit, wait=max(0, unit.wait - 1))
        return [name for name, unit in self.units.items() if unit.back and not unit.wait]

    def measured(self, units: Mapping[str, tuple[float, float]], stay: Collection[str]) -> None:
        """Units that were due come forward, with (weight, error); those that must `stay` back wait twice as long."""
        for name in stay:
            self._step_back(name)
        for name, (weight, error) in units.items():
            self.units[name] = replace(self.units[name], back=False, weight=weight, error=error)


def factor(a: float, b: float) -> float:
    """By what factor, at least 1, two positive numbers differ."""
    return max(a / b, b / a)


def _finite(reading: Reading) -> bool:
    return all(map(math.isfinite, (reading.error, reading.energy, reading.lost_values)))
