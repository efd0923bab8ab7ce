"""The quality of a plan: by measured errors within a budget, or, where none were measured, by the order of codecs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from syncline.plan.errors import Budget, Errors
from syncline.plan.unit import Unit

LEVELS = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Budgets of the frontier, besides the budget asked for: what each would buy."""


class Quality(Protocol):
    """Judges the units of a plan."""

    def lost(self, units: Sequence[Unit]) -> float:
        """How much they lose; more is worse."""

    def allows(self, units: Sequence[Unit]) -> bool:
        """Whether a plan may have these units."""


@dataclass(frozen=True)
class ByOrder:
    """Without measured errors: codecs lose more the later they are named, and all that are named are allowed."""

    names: Sequence[str]

    def lost(self, units: Sequence[Unit]) -> float:
        """The position of the codec that loses most."""
        return float(max(self.names.index(unit.codec) for unit in units))

    def allows(self, units: Sequence[Unit]) -> bool:
        """All are."""
        return True


@dataclass(frozen=True)
class ByError:
    """With measured errors: the relative squared error of all gradients together, inside a budget."""

    errors: Errors
    budget: Budget

    def lost(self, units: Sequence[Unit]) -> float:
        """The error of these units together."""
        return self.errors.total(units)

    def allows(self, units: Sequence[Unit]) -> bool:
        """Whether they are inside the budget."""
        return self.budget.allows(units, self.errors)

    def levels(self) -> list["ByError"]:
        """The same errors with budgets from very small to beyond the one asked for, each with its limit for units."""
        limits = sorted({0.0, self.budget.error, *LEVELS})
        return [
            self if limit == self.budget.error else ByError(self.errors, Budget(limit, adaptive=self.budget.adaptive))
            for limit in limits
        ]

    def share(self, unit: Unit) -> float:
        """The part of the plan's error that a unit has; infinite if one of its modules loses more than it may."""
        if not self.budget.allows_unit(unit, self.errors):
            return math.inf
        whole, lost = sum(self.errors.energy.values()), self.errors.lost(unit)
        return lost / whole if whole else lost
