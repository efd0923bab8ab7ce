"""Plans for models with frozen parameters: restrict a plan to the trained parameters, and extend it to all of them."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count

from syncline.plan.default import default_plan
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit


def trained(plan: Plan, shapes: Sequence[Shape]) -> Plan:
    """The plan restricted to these parameters; units without any of them are removed."""
    values = {shape.name: shape.values for shape in shapes}
    units = []
    for unit in plan.units:
        names = tuple(name for name in unit.parameters if name in values)
        if names:
            parts = min(unit.partitions, max(1, sum(values[name] for name in names)))
            units.append(replace(unit, parameters=names, partitions=parts))
    live = {(unit.name, part) for unit in units for part in range(unit.partitions)}
    return Plan(tuple(units), tuple(part for part in plan.order if part in live), plan.about, plan.executor)


def ordered_as(plan: Plan, part: Plan) -> Plan:
    """The plan with the launches of a restricted plan first, in its order, and all other launches behind."""
    first = set(part.order)
    return replace(plan, order=part.order + tuple(one for one in plan.order if one not in first), about=part.about)


def whole(plan: Plan, shapes: Sequence[Shape], *, codec: str = "none", exchange: str | None = None) -> Plan:
    """Extend a plan to the whole model: the other parameters get units with this codec, launched last."""
    known = {name for unit in plan.units for name in unit.parameters}
    rest = [shape for shape in shapes if shape.name not in known]
    if not rest:
        return plan
    other = default_plan(rest, compress=codec, exchange=exchange)
    names = _names(other.units, {unit.name for unit in plan.units})
    units = tuple(replace(unit, name=names[unit.name]) for unit in other.units)
    order = tuple((names[name], part) for name, part in other.order)
    # Units are listed in forward order, by their first parameter.
    at = {shape.name: number for number, shape in enumerate(shapes)}
    listed = sorted((*plan.units, *units), key=lambda unit: min(at[name] for name in unit.parameters))
    return Plan(tuple(listed), plan.order + order, plan.about, plan.executor)


def _names(units: Sequence[Unit], taken: Collection[str]) -> dict[str, str]:
    """Unique names beside the ones already used: a module may be partly frozen."""
    used, found = set(taken), {}
    for unit in units:
        free = (f"{unit.name}#{number}" for number in count(2))
        found[unit.name] = name = unit.name if unit.name not in used else next(n for n in free if n not in used)
        used.add(name)
    return found
