"""Compression errors measured on a job's gradients: by codec and parameter, of a unit, of a plan, and the error budget.

Errors are kept for each parameter, because the planner groups parameters in many ways: squared errors and squared norms
add up, so the error of any unit or plan follows from them.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from syncline.errors import UsageError
from syncline.plan.predict import built
from syncline.plan.unit import Unit

VERSION = 1
ROUNDING = {"none": 0.0, "bf16": 2.0**-18 / 3, "fp16": 2.0**-22 / 3}
"""Relative squared errors of codecs that only round: known, not measured."""
DEFAULT_ERROR = 0.01
"""The budget of `auto` with SGD: relative squared error of the sum of the averaged gradients of a few steps."""
ADAPTIVE_ERROR = 0.001
"""The same with other optimizers. Adam divides each value by its usual size, so errors of small values count as much as
those of large ones: with a budget of 0.01 it ended up to two points below dense (docs/planner.md)."""
UNIT_FACTOR = 3.0
"""No module may lose more than this many times the budget: an optimizer that scales each layer would notice."""
VALUES_FACTOR = 100.0
"""With optimizers that scale each value, no parameter may lose more than this many times the budget of its values."""
MOST = 1e6
"""Errors are not counted beyond this: such a codec is of no use, and a file holds no infinite number."""


@dataclass(frozen=True)
class CodecError:
    """What a codec loses of one parameter's averaged gradients, as shares of squared norms."""

    one_step: float
    """|C(g) - g|^2 / |g|^2 in the first step, without a residual."""
    with_feedback: float
    """|sum C(g) - sum g|^2 / |sum g|^2 over a window of steps, with the residual carried on: what training misses."""
    residual_growth: float = 1.0
    """|sum C(g) - sum g|^2 after the window, divided by its value after the first step."""
    lost_values: float = 0.0
    """The share of values that are lost: each counts by (sum C(g) - sum g)^2 / sum g^2 over the window, at most 1.
    Values much smaller than their neighbours are lost at a small squared error, and Adam needs them all the same."""


@dataclass(frozen=True)
class Errors:
    """Errors of the codecs that were measured on the parameters of a job."""

    energy: Mapping[str, float]
    """By parameter: |sum g|^2 over the window."""
    codecs: Mapping[str, Mapping[str, CodecError]] = field(default_factory=dict)
    """By codec and parameter."""

    def of(self, unit: Unit) -> float:
        """The relative squared error of a unit with its codec; infinite if it was not measured."""
        lost, whole = self.lost(unit), self._energy(unit)
        return lost / whole if whole else 0.0 if not lost else math.inf

    def lost(self, unit: Unit) -> float:
        """The squared error of a unit with its codec, in the measure of `energy`."""
        if unit.codec in ROUNDING:
            return ROUNDING[unit.codec] * self._energy(unit)
        found = self.codecs.get(built(unit.codec).text, {})
        total = 0.0
        for name in unit.parameters:
            if name not in found:
                return math.inf
            total += found[name].with_feedback * self.energy.get(name, 0.0)
        return total

    def worst(self, unit: Unit) -> float:
        """The largest relative squared error of a module of the unit: a large one must not hide a ruined small one."""
        modules: dict[str, list[str]] = {}
        for name in unit.parameters:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        return max(self.of(replace(unit, parameters=tuple(names))) for names in modules.values())

    def lost_values(self, unit: Unit) -> float:
        """The largest share of values that a parameter of the unit loses; infinite if it was not measured."""
        if unit.codec in ROUNDING:
            return 0.0
        found = self.codecs.get(built(unit.codec).text, {})
        return max(found[name].lost_values if name in found else math.inf for name in unit.parameters)

    def total(self, units: Iterable[Unit]) -> float:
        """The relative squared error of all units together: each counts by the energy of its gradient."""
        rows = list(units)
        whole = sum(self._energy(unit) for unit in rows)
        lost = sum(self.lost(unit) for unit in rows)
        return lost / whole if whole else 0.0 if not lost else math.inf

    def _energy(self, unit: Unit) -> float:
        return sum(self.energy.get(name, 0.0) for name in unit.parameters)

    def updated(self, other: "Errors") -> "Errors":
        """These errors with those of another measurement in their place, where that has some."""
        codecs = {spec: {**self.codecs.get(spec, {}), **rows} for spec, rows in other.codecs.items()}
        return Errors({**self.energy, **other.energy}, {**self.codecs, **codecs})

    def without(self, spec: str, names: Iterable[str]) -> "Errors":
        """These errors without those of a codec on some parameters."""
        gone = set(names)
        rows = {name: row for name, row in self.codecs.get(spec, {}).items() if name not in gone}
        return replace(self, codecs={**self.codecs, spec: rows})

    def scaled(self, factor: float) -> "Errors":
        """All errors multiplied by a factor."""
        return Errors(
            self.energy,
            {
                spec: {
                    name: replace(row, with_feedback=row.with_feedback * factor, lost_values=row.lost_values * factor)
                    for name, row in rows.items()
                }
                for spec, rows in self.codecs.items()
            },
        )

    def to_json(self) -> str:
        """As text, for a run folder."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"


@dataclass(frozen=True)
class Budget:
    """The most that a plan may lose, as relative squared errors."""

    error: float = DEFAULT_ERROR
    """Of all gradients together."""
    unit: float = field(default=0.0)
    """Of each module; 0: `UNIT_FACTOR` times `error`."""
    adaptive: bool = False
    """Whether the optimizer scales each value by itself, as Adam does, so that no value may be lost."""

    def __post_init__(self) -> None:
        if not 0 <= self.error <= MOST:
            raise UsageError(f"error={self.error}: use a relative squared error, such as 0.01; 0 allows only BF16")
        if not self.unit:
            object.__setattr__(self, "unit", UNIT_FACTOR * self.error)

    @property
    def values(self) -> float:
        """The largest share of values that a parameter may lose; infinite if that does not matter."""
        return VALUES_FACTOR * self.error if self.adaptive else math.inf

    def allows(self, units: Iterable[Unit], errors: Errors) -> bool:
        """Whether these units stay inside the budget, each and all together. Codecs that only round always do."""
        rows = list(units)
        if all(unit.codec in ROUNDING for unit in rows):
            return True
        return errors.total(rows) <= self.error and all(self.allows_unit(unit, errors) for unit in rows)

    def allows_unit(self, unit: Unit, errors: Errors) -> bool:
        """Whether each module of a unit, and each of its parameters, stays inside its limits."""
        if unit.codec in ROUNDING:
            return True
        return errors.worst(unit) <= self.unit and errors.lost_values(unit) <= self.values


def errors_of(content: Any) -> Errors:
    """The errors in a parsed JSON text; various errors if there are none."""
    table = dict(content)
    if table.pop("version") != VERSION:
        raise ValueError(f"these are not errors of version {VERSION}")
    codecs = {
        str(spec): {str(name): CodecError(**row) for name, row in rows.items()}
        for spec, rows in table["codecs"].items()
    }
    return Errors({str(name): float(value) for name, value in table["energy"].items()}, codecs)
