"""Choose a codec for each unit: SeCoPa's rule, an error budget, and single changes that shorten the simulated step."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from syncline.plan.candidates import part_count, wire_seconds, with_units
from syncline.plan.costs import Costs
from syncline.plan.knapsack import Option, spend
from syncline.plan.predict import exchanges_to_weigh, job, predict
from syncline.plan.quality import ByError, Quality
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit

LARGEST = 12
"""How many of the largest units are tried one by one."""
GAIN = 0.003
"""The share by which a single change must shorten the step."""


def secopa(unit: Unit, shapes: Sequence[Shape], costs: Costs, codec: str) -> tuple[float, float]:
    """SeCoPa's two times of a unit on its own: uncompressed, and compressed with `codec`."""
    by_name = {shape.name: shape for shape in shapes}
    return tuple(alone(best_as(unit, by_name, costs, name), by_name, costs) for name in ("none", codec))  # type: ignore[return-value]


def alone(unit: Unit, shapes: Mapping[str, Shape], costs: Costs) -> float:
    """Seconds of a unit on its own: codec work, latencies and bytes of its parts, one after the other."""
    one = job(unit, shapes, costs)
    codec = one.encode + one.between * max(0, len(one.rounds) - 1) + one.decode
    return unit.partitions * (codec + sum(r.latency + r.wire for r in one.rounds))


def fastest_alone(plan: Plan, shapes: Sequence[Shape], costs: Costs, names: Sequence[str]) -> Plan:
    """SeCoPa's rule: give every unit the codec that is fastest for this unit on its own."""
    by_name = {shape.name: shape for shape in shapes}
    changed: dict[str, Unit] = {}
    for unit in plan.units:
        choices = [unit, *(best_as(unit, by_name, costs, name) for name in names)]
        changed[unit.name] = min(choices, key=lambda u: alone(u, by_name, costs))
    return with_units(plan, changed)


def within_budget(
    plan: Plan,
    shapes: Sequence[Shape],
    costs: Costs,
    names: Sequence[str],
    quality: ByError,
    *,
    free: Collection[str] | None = None,
) -> Plan:
    """Give every unit one of these codecs, such that the budget of errors is spent where it saves most time.

    `free`: the units that may change, by name; None: all.
    """
    by_name = {shape.name: shape for shape in shapes}
    may_change = [unit for unit in plan.units if free is None or unit.name in free]
    used = sum(quality.share(unit) for unit in plan.units if unit not in may_change)
    ways = [[best_as(unit, by_name, costs, name) for name in names] for unit in may_change]
    options = [[Option(alone(way, by_name, costs), quality.share(way)) for way in row] for row in ways]
    chosen = spend(options, quality.budget.error - used)
    return with_units(plan, {row[n].name: row[n] for row, n in zip(ways, chosen, strict=True)})


def mix_codecs(
    plan: Plan, step: float, shapes: Sequence[Shape], costs: Costs, names: Sequence[str], quality: Quality
) -> tuple[Plan, float]:
    """Try other codecs for the largest units, one by one, and keep each allowed change that shortens the step."""
    by_name = {shape.name: shape for shape in shapes}
    largest = sorted(plan.units, key=lambda u: (-wire_seconds(u, by_name, costs), u.name))[:LARGEST]
    for name in [unit.name for unit in largest]:
        unit = next(u for u in plan.units if u.name == name)
        for trial in _others(unit, by_name, costs, names):
            candidate = with_units(plan, {name: trial})
            if not quality.allows(candidate.units):
                continue
            predicted = predict(candidate, shapes, costs).step
            if predicted < step * (1 - GAIN):
                plan, step = candidate, predicted
    return plan, step


def _others(unit: Unit, shapes: Mapping[str, Shape], costs: Costs, names: Sequence[str]) -> Iterator[Unit]:
    """The unit with codecs that are faster on their own, and uncompressed, which frees lanes and cores."""
    now = alone(unit, shapes, costs)
    for name in names:
        trial = best_as(unit, shapes, costs, name)
        if trial.codec != unit.codec and (name == "none" or alone(trial, shapes, costs) < now):
            yield trial


def best_as(unit: Unit, shapes: Mapping[str, Shape], costs: Costs, codec: str) -> Unit:
    """The unit with this codec and its fastest exchange, in as many parts as keep the length of a part."""
    if codec == unit.codec:
        return unit
    longest = wire_seconds(unit, shapes, costs) / unit.partitions
    made = []
    for carrier in exchanges_to_weigh(codec, costs.world, costs.node):
        whole = replace(unit, codec=codec, exchange=carrier, partitions=1)
        parts = 1
        if unit.partitions > 1 and longest:
            parts = part_count(whole, shapes, round(wire_seconds(whole, shapes, costs) / longest))
        made.append(replace(whole, partitions=parts))
    return min(made, key=lambda u: alone(u, shapes, costs))
