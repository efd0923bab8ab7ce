"""Codecs unit by unit: SeCoPa's rule, and single changes that the simulator approves of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from syncline.plan.candidates import cut, exchanged, wire_of
from syncline.plan.costs import Costs
from syncline.plan.predict import carriers, job, predict
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit

LARGEST = 12
"""So many units are looked at one by one."""
GAIN = 0.003
"""The share by which a single change must shorten the step."""


def secopa(unit: Unit, shapes: Sequence[Shape], costs: Costs, codec: str) -> tuple[float, float]:
    """SeCoPa's two times of a unit by itself: as it is, and compressed with `codec`."""
    by_name = {shape.name: shape for shape in shapes}
    return tuple(alone(_best_as(unit, by_name, costs, name), by_name, costs) for name in ("none", codec))  # type: ignore[return-value]


def alone(unit: Unit, shapes: Mapping[str, Shape], costs: Costs) -> float:
    """Seconds of a unit that has lanes and wire to itself: codec, latencies and bytes of its parts in a row."""
    one = job(unit, shapes, costs)
    codec = one.encode + one.between * max(0, len(one.rounds) - 1) + one.decode
    return unit.partitions * (codec + sum(r.latency + r.wire for r in one.rounds))


def ruled(plan: Plan, shapes: Sequence[Shape], costs: Costs, names: Sequence[str]) -> Plan:
    """SeCoPa's rule for every unit: of these codecs, the one with which it takes least by itself."""
    by_name = {shape.name: shape for shape in shapes}
    changed: dict[str, Unit] = {}
    for unit in plan.units:
        choices = [unit, *(_best_as(unit, by_name, costs, name) for name in names)]
        changed[unit.name] = min(choices, key=lambda u: alone(u, by_name, costs))
    return exchanged(plan, changed)


def mixed(plan: Plan, step: float, shapes: Sequence[Shape], costs: Costs, names: Sequence[str]) -> tuple[Plan, float]:
    """The largest units with other codecs, one by one, as long as that shortens the step."""
    by_name = {shape.name: shape for shape in shapes}
    largest = sorted(plan.units, key=lambda u: (-wire_of(u, by_name, costs), u.name))[:LARGEST]
    for name in [unit.name for unit in largest]:
        unit = next(u for u in plan.units if u.name == name)
        for trial in _others(unit, by_name, costs, names):
            candidate = exchanged(plan, {name: trial})
            told = predict(candidate, shapes, costs).step
            if told < step * (1 - GAIN):
                plan, step = candidate, told
    return plan, step


def _others(unit: Unit, shapes: Mapping[str, Shape], costs: Costs, names: Sequence[str]) -> Iterator[Unit]:
    """The unit with codecs that take less by themselves than the one it has; and plain, which frees lanes and cores."""
    now = alone(unit, shapes, costs)
    for name in names:
        trial = _best_as(unit, shapes, costs, name)
        if trial.codec != unit.codec and (name == "none" or alone(trial, shapes, costs) < now):
            yield trial


def _best_as(unit: Unit, shapes: Mapping[str, Shape], costs: Costs, codec: str) -> Unit:
    """The unit with a codec and the faster of its exchanges; in as many parts as make parts of about equal length."""
    if codec == unit.codec:
        return unit
    longest = wire_of(unit, shapes, costs) / unit.partitions
    made = []
    for carrier in carriers(codec, costs.world):
        whole = replace(unit, codec=codec, exchange=carrier, partitions=1)
        parts = 1
        if unit.partitions > 1 and longest:
            parts = cut(whole, shapes, round(wire_of(whole, shapes, costs) / longest))
        made.append(replace(whole, partitions=parts))
    return min(made, key=lambda u: alone(u, shapes, costs))
