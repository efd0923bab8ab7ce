"""A plan and cost curves as a scenario of the simulator: what would a step take?"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from syncline import codecs, exchange
from syncline.codecs.build import LATE
from syncline.plan.costs import CodecCost, Costs
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit
from syncline.sim import Job, Layer, Outcome, Round, Scenario, simulate

# As the engine groups tensors within a unit.
_SMALL = 16384


def predict(plan: Plan, shapes: Sequence[Shape], costs: Costs, *, spans: bool = False) -> Outcome:
    """What the simulator says of a step under this plan."""
    return simulate(scenario(plan, shapes, costs), spans=spans)


def scenario(plan: Plan, shapes: Sequence[Shape], costs: Costs) -> Scenario:
    """Layers lie between the first uses of the plan's units; launches cost what their codec and bytes cost."""
    by_name = {shape.name: shape for shape in shapes}
    layers, ready, index = _layers(plan.units, costs)
    made = {unit.name: _jobs(unit, by_name, costs, index[unit.name], ready[unit.name]) for unit in plan.units}
    jobs = tuple(made[name] for name, _ in plan.order)
    values = [sum(by_name[name].values for name in unit.parameters) for unit in plan.units]
    return Scenario(
        layers=layers,
        jobs=jobs,
        update=tuple(costs.update(v) for v in values),
        data=costs.data,
        tail=costs.tail,
        lanes=costs.lanes,
        contention=costs.contention,
    )


def _layers(units: Sequence[Unit], costs: Costs) -> tuple[tuple[Layer, ...], dict[str, int], dict[str, int]]:
    index = {unit.name: at for at, unit in enumerate(units)}
    touched = {u.name: min(costs.touched.get(p, 0.0) for p in u.parameters) for u in units}
    complete = {u.name: max(costs.complete.get(p, costs.backward) for p in u.parameters) for u in units}
    order = sorted(units, key=lambda u: (touched[u.name], index[u.name]))
    # The backward pass visits layers in reverse: what is complete later than a layer before it ends that one.
    ends, latest = [0.0] * len(order), 0.0
    for at in range(len(order) - 1, -1, -1):
        latest = max(latest, complete[order[at].name])
        ends[at] = latest
    layers, ready = [Layer("start", min(costs.forward, touched[order[0].name]), 0.0)], {}
    layers[0] = Layer("start", layers[0].forward, max(0.0, costs.backward - ends[0]))
    for at, unit in enumerate(order):
        begin = min(costs.forward, touched[unit.name])
        until = min(costs.forward, touched[order[at + 1].name]) if at + 1 < len(order) else costs.forward
        before = ends[at + 1] if at + 1 < len(order) else 0.0
        layers.append(Layer(unit.name, max(0.0, until - begin), max(0.0, ends[at] - before), (index[unit.name],)))
        ready[unit.name] = len(layers) - 1
    return tuple(layers), ready, index


def _jobs(unit: Unit, shapes: Mapping[str, Shape], costs: Costs, index: int, ready: int) -> Job:
    """One part of the unit: they are all alike."""
    members = tuple((name, shapes[name].shape) for name in unit.parameters)
    dtype = shapes[unit.parameters[0]].dtype
    sent = _bytes(unit.codec, unit.exchange, members, dtype, unit.partitions, costs.world)
    values = sum(shapes[name].values for name in unit.parameters) / unit.partitions
    cost = costs.codecs.get(unit.codec, CodecCost())
    rounds = tuple(Round(costs.link.latency, size / costs.link.bytes_per_s) for size in sent)
    return Job(index, ready, cost.encode(values), rounds, cost.between(values), cost.decode(values))


@lru_cache(maxsize=65536)
def _bytes(
    codec: str, carrier: str, members: tuple[tuple[str, tuple[int, ...]], ...], dtype: torch.dtype, parts: int,
    world: int,
) -> tuple[float, ...]:  # fmt: skip
    """What the busiest rank sends in each round of one launch, the mean of two late steps."""
    built, link = codecs.build(codec), exchange.build(carrier)
    if parts == 1:
        names, shapes = [n for n, _ in members], [s for _, s in members]
        packed = [batch.shape for batch in codecs.batches(built, names, shapes, small=_SMALL)]
    else:
        packed = [(sum(torch.Size(s).numel() for _, s in members) // parts,)]
    totals: dict[int, float] = {}
    for step in (LATE, LATE + 1):
        for shape in packed:
            for number, one in enumerate(built.rounds(shape, dtype, step=step, packed=True)):
                totals[number] = totals.get(number, 0.0) + max(link.sent_bytes(one, world)) / 2
    return tuple(totals[number] for number in sorted(totals))
