"""Checks of a plan, by itself and against a model. Each error says how to fix it."""

import difflib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from syncline import codecs, exchange
from syncline.errors import UsageError, unknown
from syncline.plan.unit import Part, Shape, Unit

_Item = TypeVar("_Item", bound=Hashable)


def table(units: Sequence[Unit], order: Sequence[Part]) -> None:
    """Raise unless unit names are unique and the order launches every part of every unit exactly once."""
    by_name = {unit.name: unit for unit in units}
    if len(by_name) < len(units):
        raise UsageError(f"two units are called '{_repeated(u.name for u in units)}': give each a different name")
    for unit in units:
        if unit.partitions < 1:
            raise UsageError(f"unit '{unit.name}' has partitions = {unit.partitions}: use 1 or more")
    for name, part in order:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "name one of its units"
            raise UsageError(f"the order launches '{name}', which is not a unit of the plan: {hint}")
        if not 0 <= part < (parts := by_name[name].partitions):
            last = by_name[name].label(parts - 1)
            raise UsageError(f"the order launches '{name}[{part}]': the last part of that unit is '{last}'")
    launched = set(order)
    if len(launched) < len(order):
        name, part = _repeated(order)
        raise UsageError(f"the order launches '{by_name[name].label(part)}' twice: keep one of the two")
    if missing := sum(unit.partitions for unit in units) - len(launched):
        first = next(u.label(i) for u in units for i in range(u.partitions) if (u.name, i) not in launched)
        more = f" and {missing - 1} more" if missing > 1 else ""
        raise UsageError(f"the order does not launch '{first}'{more}: add each part where it should be sent")


EXECUTORS = ("overlap", "reducer")
REDUCER_CODECS = ("none", "bf16", "fp16")


def executor(name: str, units: Sequence[Unit]) -> None:
    """Raise unless this executor exists and can run these units."""
    if name not in EXECUTORS:
        raise UsageError(f"the plan: {unknown('executor', name, EXECUTORS)}")
    if name != "reducer":
        return
    for unit in units:
        if unit.codec not in REDUCER_CODECS or unit.exchange != "allreduce" or unit.partitions != 1:
            raise UsageError(
                f"unit '{unit.name}' ({unit.codec}, {unit.exchange}, partitions = {unit.partitions}): executor"
                f" 'reducer' takes codec {', '.join(REDUCER_CODECS)}, exchange allreduce and partitions = 1, so change"
                ' the unit or use executor = "overlap"'
            )
    if len({unit.codec for unit in units}) > 1:
        codecs = ", ".join(sorted({unit.codec for unit in units}))
        raise UsageError(f"the units have codecs {codecs}: executor 'reducer' takes the same codec for all units")


def model(units: Sequence[Unit], shapes: Sequence[Shape], *, world: int) -> None:
    """Raise unless the units hold each parameter exactly once, and their codecs and exchanges work on `world` ranks."""
    parameters = trainable(shapes)
    owner: dict[str, str] = {}
    for unit in units:
        if not unit.parameters:
            raise UsageError(f"unit '{unit.name}' has no parameters: give it some, or remove it and its launches")
        for name in unit.parameters:
            if name not in parameters:
                near = difflib.get_close_matches(name, parameters, n=1)
                hint = f"did you mean '{near[0]}'?" if near else "remove it, or make the plan again for this model"
                raise UsageError(f"unit '{unit.name}' has parameter '{name}', which the model does not train: {hint}")
            if name in owner:
                where = "twice in" if owner[name] == unit.name else f"in unit '{owner[name]}' and in"
                raise UsageError(f"parameter '{name}' is {where} unit '{unit.name}': keep it in one place")
            owner[name] = unit.name
    if missing := [name for name in parameters if name not in owner]:
        raise UsageError(f"no unit of the plan has {_first(missing)}: add it to one, or make the plan again")
    seen: set[tuple[str, str]] = set()
    trained_by: dict[int, Unit] = {}
    for unit in units:
        _values(unit, [parameters[name] for name in unit.parameters])
        # Building a codec takes milliseconds, and most units have the same one.
        if (unit.codec, unit.exchange) not in seen:
            trained_by.setdefault(_carried(unit, world), unit)
            seen.add((unit.codec, unit.exchange))
        if unit.partitions > 1:
            _cut(unit)
    if len(trained_by) > 1:
        first, other = list(trained_by.values())[:2]
        raise UsageError(
            f"units '{first.name}' ({first.exchange}) and '{other.name}' ({other.exchange}) leave different ranks to"
            " train: use the same dedicated servers for all units"
        )


def trainable(shapes: Sequence[Shape]) -> dict[str, Shape]:
    """The parameters by name; raise if there are none, one is given twice, or one is not floating point."""
    if not shapes:
        raise UsageError("nothing to train: the model has no parameter with requires_grad=True")
    by_name = {shape.name: shape for shape in shapes}
    if len(by_name) < len(shapes):
        raise UsageError(f"parameter '{_repeated(s.name for s in shapes)}' is given twice: give each parameter once")
    for shape in shapes:
        if not shape.dtype.is_floating_point:
            kind = _dtype(shape)
            raise UsageError(f"parameter '{shape.name}' is {kind}: only floating-point ones train, make it a buffer")
    return by_name


def _values(unit: Unit, members: Sequence[Shape]) -> None:
    first = members[0]
    for other in members:
        if other.dtype != first.dtype:
            raise UsageError(
                f"unit '{unit.name}' mixes {_dtype(first)} ('{first.name}') and {_dtype(other)} ('{other.name}'):"
                " put them into units of their own"
            )
    values = sum(member.values for member in members)
    if unit.partitions > max(1, values):
        raise UsageError(
            f"unit '{unit.name}' has partitions = {unit.partitions} and {values} values: use 1 to {max(1, values)}"
        )


def _carried(unit: Unit, world: int) -> int:
    """How many ranks train with this unit's exchange; raise unless it can carry the codec."""
    try:
        return exchange.check(unit.codec, unit.exchange).workers(world)
    except UsageError as error:
        raise UsageError(f"unit '{unit.name}': {error}") from None


def _cut(unit: Unit) -> None:
    if codecs.build(unit.codec).view == "matrix":
        known = {name: codecs.CODECS.get(name) for name in codecs.available()}
        flat = [name for name, codec in known.items() if codec.view == "flat" and not codec.wraps]
        raise UsageError(
            f"unit '{unit.name}' has partitions = {unit.partitions} and codec '{unit.codec}' works on whole matrices:"
            f" use partitions = 1, or a codec of flat values ({', '.join(flat)})"
        )


def _repeated(items: Iterable[_Item]) -> _Item:
    return Counter(items).most_common(1)[0][0]


def _first(names: Sequence[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _dtype(shape: Shape) -> str:
    return str(shape.dtype).removeprefix("torch.")
