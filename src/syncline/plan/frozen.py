"""Plans while some parameters are frozen: made for those that train, and whole again for the day they are set free."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count

from syncline.plan.default import default_plan
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit


def trained(plan: Plan, shapes: Sequence[Shape]) -> Plan:
    """The plan as it runs while only these parameters train: others, and units of others alone, are left out."""
    values = {shape.name: shape.values for shape in shapes}
    units = []
    for unit in plan.units:
        names = tuple(name for name in unit.parameters if name in values)
        if names:
            parts = min(unit.partitions, max(1, sum(values[name] for name in names)))
            units.append(replace(unit, parameters=names, partitions=parts))
    live = {(unit.name, part) for unit in units for part in range(unit.partitions)}
    return Plan(tuple(units), tuple(part for part in plan.order if part in live), plan.about)


def ordered_as(plan: Plan, part: Plan) -> Plan:
    """A whole plan whose launches go in the order of a plan of some of them; the others behind."""
    first = set(part.order)
    return replace(plan, order=part.order + tuple(one for one in plan.order if one not in first), about=part.about)


def whole(plan: Plan, shapes: Sequence[Shape], *, codec: str = "none", exchange: str | None = None) -> Plan:
    """A plan of some parameters with the others of a model behind them, in units of their own with this codec."""
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
    return Plan(tuple(listed), plan.order + order, plan.about)


def _names(units: Sequence[Unit], taken: Collection[str]) -> dict[str, str]:
    """Names for units beside others: a module may be frozen in part."""
    used, found = set(taken), {}
    for unit in units:
        free = (f"{unit.name}#{number}" for number in count(2))
        found[unit.name] = name = unit.name if unit.name not in used else next(n for n in free if n not in used)
        used.add(name)
    return found
