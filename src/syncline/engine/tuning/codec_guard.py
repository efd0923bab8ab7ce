"""The guard of codec errors: units whose codec loses too much in the running job step back, and forward again later.

Every `EVERY` steps some units are watched (`error_watch.py`). `guard_rules.py` decides which of them step back to a
codec that loses next to nothing. Those are measured again later on their averaged gradients, and get a codec that fits
the budget then.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.engine.protocols import TunableEngine
from syncline.engine.tuning.error_watch import STEPS, ErrorWatch
from syncline.engine.tuning.guard_rules import GuardRules, Reading, factor
from syncline.engine.tuning.measure_errors import GradientHistory
from syncline.plan.auto_spec import Auto
from syncline.plan.candidates import with_units
from syncline.plan.costs import Costs
from syncline.plan.errors import ROUNDING, CodecError, Errors
from syncline.plan.per_unit_codecs import alone, best_as, within_budget
from syncline.plan.planner import ALWAYS
from syncline.plan.predict import built
from syncline.plan.quality import ByError
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit

EVERY = 20
"""Steps between two checks."""
WATCHED = 8
"""How many units are watched in one check; the others in the next ones."""
KEPT = 1000
"""How many readings are kept."""
HYSTERESIS = 2.0
"""A unit comes forward only if this many times its measured error fits the budget."""
NEXT_TO_NOTHING = 0.01
"""A unit steps back to a codec that loses at most this share of what a unit may lose, or to one that only rounds."""


@dataclass(frozen=True)
class CodecChange:
    """A unit got another codec while the job trained."""

    step: int
    unit: str
    before: str
    after: str
    why: str

    def __str__(self) -> str:
        return f"step {self.step}: unit '{self.unit}' changes from {self.before} to {self.after}: {self.why}"


@dataclass(frozen=True)
class _Guarded:
    """The plan that is guarded, and what is known about its job."""

    plan: Plan
    """With the codecs in use now."""
    shapes: Sequence[Shape]
    costs: Costs


class CodecGuard:
    """Guards the plan of a running job. All ranks call all methods after the same steps, and get the same answers."""

    def __init__(self, engine: TunableEngine, automatic: Auto) -> None:
        self._engine, self._automatic = engine, automatic
        self.rules = GuardRules(automatic.budget)
        self.errors: Errors | None = None
        """What the codecs lose, as it was measured last."""
        self.changes: list[CodecChange] = []
        self.readings: deque[tuple[int, float]] = deque(maxlen=KEPT)
        """The step and the error of all gradients in each check, the newest last."""
        self._guarded: _Guarded | None = None
        self._steps = 0
        self._rate, self._jump = 0.0, 1.0
        """The learning rate of the last step, and its largest change from a step to the next since the last check."""
        self._turn = 0
        """Where the next check begins in the list of units."""
        self._watch: ErrorWatch | None = None
        self._history: GradientHistory | None = None
        self._due: list[str] = []
        """The units that are being measured again."""

    def planned(
        self, plan: Plan, shapes: Sequence[Shape], costs: Costs, errors: Errors, *, verified: bool = True
    ) -> Plan:
        """Guard a plan from now on; returns the one to run.

        `verified=False`: the errors are of an earlier run, so lossy codecs wait until they are measured in this one.
        """
        self.stop()
        self.errors, self._guarded = errors, _Guarded(plan, shapes, costs)
        lossy = [unit for unit in plan.units if unit.codec not in ROUNDING]
        # Gradients that were zero when the errors were measured are measured later, beside those of lossy units.
        known = {name for rows in errors.codecs.values() for name in rows}
        later = [unit.name for unit in plan.units if unit not in lossy and not known.issuperset(unit.parameters)]
        weights = _weights(plan.units, errors)
        planned = {u.name: (weights[u.name], errors.of(u)) for u in lossy}
        self.rules.planned(planned, verified=verified, later=later if lossy else ())
        if not verified:
            self._guarded = replace(self._guarded, plan=self._with_better(lossy))
            self._steps = EVERY - 1  # measure at once
        return self._guarded.plan

    def stop(self) -> Errors | None:
        """Guard nothing: another plan is tried or measured. Returns the errors as known now, and forgets them."""
        if self._watch is not None:
            self._watch.stop()
        self._guarded = self._watch = self._history = None
        self._steps, self._rate, self._jump = 0, 0.0, 1.0
        learnt, self.errors = self.errors, None
        return learnt

    def after_step(self) -> Plan | None:
        """A step has ended; returns another plan, if one is to be used from now on."""
        if self._guarded is None or self._engine.fell_back or not self.rules.units:
            return None
        self._steps += 1
        self._follow_rate()
        if self._watch is not None:
            found = self._watch.after_step()
            if found is None:
                return None
            self._watch = None
            return self._judge(*found)
        if self._history is not None:
            self._engine.wait()
            self._history.add()
            return self._come_forward() if self._history.count == STEPS else None
        if self._steps % EVERY == 0:
            self._check(self._guarded)
        return None

    def _follow_rate(self) -> None:
        before, self._rate = self._rate, self._engine.learning_rate
        if before > 0 and self._rate > 0:
            self._jump = max(self._jump, factor(before, self._rate))

    def table(self) -> str:
        """The errors as aligned text: of each lossy unit, planned or read last, and of all gradients."""
        if self._guarded is None or self.errors is None:
            return "no errors are known: nothing was measured, or another plan is being tried"
        used = {unit.name: unit.codec for unit in self._guarded.plan.units}
        rows = [("unit", "codec", "error", "share of the gradient")]
        for name, unit in self.rules.units.items():
            error = "measured again later" if unit.back else f"{unit.error:.2g}"
            rows.append((name, used[name], error, f"{unit.weight:.1%}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        budget = self.rules.budget
        lines.append(f"all gradients: {self.rules.total:.2g} of {budget.error:g}; each unit: at most {budget.unit:g}")
        return "\n".join(lines)

    def _check(self, guarded: _Guarded) -> None:
        """Measure units whose wait is over, or watch the next ones."""
        engine = self._engine
        self._due = self.rules.due()
        if self._due:
            names = [name for u in guarded.plan.units if u.name in self._due for name in u.parameters]
            now = {unit.codec for unit in guarded.plan.units if unit.name in self._due}
            self._history = GradientHistory(engine, names, exact=now)
            return
        # Those that have stepped back to a codec that loses something are watched, too.
        forward = [u.name for u in guarded.plan.units if u.name in self.rules.units and u.codec not in ROUNDING]
        turned = [*self.rules.suspects(), *forward[self._turn :], *forward[: self._turn]]
        chosen = list(dict.fromkeys(turned))[:WATCHED]
        self._turn = (self._turn + WATCHED) % len(forward) if forward else 0
        units = [unit for unit in engine.units if unit.row.name in chosen]
        if units:
            self._watch = ErrorWatch(engine, units, jump=self._jump)
        self._jump = 1.0

    def _judge(self, readings: Mapping[str, Reading], jump: float) -> Plan | None:
        guarded, before = self._guarded, dict(self.rules.units)
        assert guarded is not None
        assert self.errors is not None
        back = self.rules.read(readings, jump=jump)
        self.readings.append((self._engine.step, self.rules.seen))
        if not back:
            return None
        units = [unit for unit in guarded.plan.units if unit.name in back]
        # Also of units that were not read now, which may have been worse than planned the last time.
        seen = {unit.name: readings.get(unit.name, before[unit.name]) for unit in units}
        errors = self.errors
        growth = {
            unit.name: max(
                _times(seen[unit.name].error, errors.of(unit)),
                _times(seen[unit.name].lost_values, errors.lost_values(unit)),
            )
            for unit in units
        }
        better = self._with_better(units, growth=growth)
        # The planner must not choose these codecs again from what it measured before.
        for unit in units:
            read, error, lost = readings.get(unit.name), self.errors.of(unit), self.errors.lost_values(unit)
            if read is not None and (read.error > error or read.lost_values > lost):
                row = CodecError(read.error, max(read.error, error), lost_values=max(read.lost_values, lost))
                worse = {built(unit.codec).text: dict.fromkeys(unit.parameters, row)}
                self.errors = self.errors.updated(Errors({}, worse))
        return self._use(better, back) if better.hash != guarded.plan.hash else None

    def _with_better(self, units: Sequence[Unit], *, growth: Mapping[str, float] | None = None) -> Plan:
        """The plan with these units dense, in BF16, or with a codec that loses next to nothing: what takes least time.

        `growth`: by unit, how many times its error is what was measured; None: no measurement counts.
        """
        guarded, errors = self._guarded, self.errors
        assert guarded is not None
        assert errors is not None
        by_name = {shape.name: shape for shape in guarded.shapes}
        budget = self._automatic.budget
        lossless = replace(budget, error=NEXT_TO_NOTHING * budget.error, unit=NEXT_TO_NOTHING * budget.unit)

        def ways(unit: Unit) -> list[Unit]:
            made = [best_as(unit, by_name, guarded.costs, name) for name in ALWAYS]
            grown = math.inf if growth is None else growth[unit.name]
            if math.isinf(grown):
                return made
            lossy = [best_as(unit, by_name, guarded.costs, name) for name in self._automatic.codecs]
            worse = errors.scaled(HYSTERESIS * max(1.0, grown))
            better = [way for way in lossy if lossless.allows_unit(way, worse)]
            # Its own codec stays if it loses next to nothing, as was measured (a critical phase).
            return made + [way for way in better if grown <= 1 or way.codec != unit.codec]

        found = {unit.name: min(ways(unit), key=lambda way: alone(way, by_name, guarded.costs)) for unit in units}
        return with_units(guarded.plan, found)

    def _come_forward(self) -> Plan | None:
        """Give the units that were due the codecs that fit the budget now, if any do."""
        guarded, history, due = self._guarded, self._history, self._due
        assert guarded is not None
        assert history is not None
        assert self.errors is not None
        self._history = None
        with self._engine.communicating("the errors of codecs"):
            found = history.measure(self._engine, self._automatic.codecs)
        # A codec loses little of what it has sent itself: that is no measurement.
        for unit in guarded.plan.units:
            if unit.name in due and unit.codec not in ROUNDING:
                found = found.without(built(unit.codec).text, unit.parameters)
        self.errors = self.errors.updated(found)
        careful = ByError(self.errors.updated(found.scaled(HYSTERESIS)), self._automatic.budget)
        names = [built(name).text for name in (*ALWAYS, *self._automatic.codecs)]
        plan = within_budget(guarded.plan, guarded.shapes, guarded.costs, names, careful, free=due)
        units = {unit.name: unit for unit in plan.units}
        errors = {name: self.errors.of(units[name]) for name in due if units[name].codec not in ROUNDING}
        weights = _weights(plan.units, self.errors)
        forward = {name: (weights[name], error) for name, error in errors.items()}
        self.rules.measured(forward, stay=[name for name in due if name not in errors])
        reasons = {name: f"its error is {error:.2g} now" for name, error in errors.items()}
        return self._use(plan, reasons) if plan.hash != guarded.plan.hash else None

    def _use(self, plan: Plan, reasons: Mapping[str, str]) -> Plan:
        """Note the changes, and what the plan loses now."""
        guarded, engine = self._guarded, self._engine
        assert guarded is not None
        assert self.errors is not None
        old = {unit.name: unit.codec for unit in guarded.plan.units}
        for unit in plan.units:
            if unit.codec != old[unit.name]:
                why = reasons.get(unit.name, "it is as fast with less error")
                self.changes.append(CodecChange(engine.step, unit.name, old[unit.name], unit.codec, why))
                engine.say(str(self.changes[-1]))
        error = float(f"{self.errors.total(plan.units):.3g}")
        plan = replace(plan, about={**plan.about, "error": error})
        self._guarded = replace(guarded, plan=plan)
        return plan


def _times(value: float, known: float) -> float:
    """How many times its known value something is; infinite if it was nothing, or is not known."""
    if not value:
        return 0.0
    return value / known if known and math.isfinite(known) else math.inf


def _weights(units: Sequence[Unit], errors: Errors) -> dict[str, float]:
    """Each unit's share of the energy of all gradients."""
    energies = {unit.name: sum(errors.energy.get(name, 0.0) for name in unit.parameters) for unit in units}
    whole = sum(energies.values())
    return {name: energy / whole if whole else 0.0 for name, energy in energies.items()}
