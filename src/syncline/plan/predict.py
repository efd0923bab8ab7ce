"""Predict the step time of a plan: turn plan and costs into a scenario of the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from syncline import codecs, exchange
from syncline.codecs.build import LATE, Round
from syncline.plan.costs import CodecCost, Costs, Curve, Host, LinkCost, over
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit
from syncline.sim import Job, Layer, Network, Outcome, Scenario, Transfer, simulate

# The engine concatenates tensors up to this size within a unit.
_SMALL = 16384
# Running a codec takes a millisecond: the bytes of larger parts are extrapolated from this many values.
_LARGE = 1 << 18
# Exchanges where all ranks send the same bytes have a closed form. Others are run for each rank, without data; beyond
# this many ranks, their bytes grow with the closed form.
_ALIKE = {"allreduce", "allgather", "sharded", "ring"}
COUNTED = 16


@dataclass(frozen=True)
class LaunchTraffic:
    """Communication of one launch of a unit: for each round, messages and bytes that the busiest node sends."""

    cells: int
    """How many batches the codec processes in it."""
    messages: tuple[float, ...]
    sent: tuple[float, ...]
    inside: tuple[float, ...]
    """Bytes that a rank sends inside its node before and after that; 0 unless the exchange is hierarchical."""


def predict(plan: Plan, shapes: Sequence[Shape], costs: Costs, *, spans: bool = False) -> Outcome:
    """Simulate a step under this plan. For torch's reducer there are no waits and no spans."""
    if plan.executor == "reducer":
        outcome = simulate(scenario(plan, shapes, costs))
        return replace(outcome, step=reducer_step(plan, shapes, costs), waits=())
    return simulate(scenario(plan, shapes, costs), spans=spans)


def reducer_step(plan: Plan, shapes: Sequence[Shape], costs: Costs) -> float:
    """Seconds of a step under torch's reducer: buckets are sent one after the other, and the update waits for all."""
    by_name = {shape.name: shape for shape in shapes}
    units = {unit.name: unit for unit in plan.units}
    free = 0.0
    for name, _ in plan.order:
        members = tuple(p for p in units[name].parameters if p in by_name)
        if not members:
            continue
        sent = job(replace(units[name], parameters=members), by_name, costs)
        ready = max(costs.complete.get(p, costs.backward) for p in members)
        wire = sum(transfer.latency + transfer.wire for transfer in sent.rounds)
        free = max(free, ready + sent.encode) + wire + sent.decode
    update = costs.update(sum(shape.values for shape in shapes))
    return costs.data + costs.forward + max(costs.backward, free) + update


def scenario(plan: Plan, shapes: Sequence[Shape], costs: Costs) -> Scenario:
    """The simulator's scenario: layers between the first uses of the plan's units, and a job for each launch."""
    by_name = {shape.name: shape for shape in shapes}
    layers, ready = _layers(plan.units, costs)
    index = {unit.name: at for at, unit in enumerate(plan.units)}
    made = {u.name: job(u, by_name, costs, index=index[u.name], ready=ready[u.name]) for u in plan.units}
    return Scenario(
        layers=layers,
        jobs=tuple(made[name] for name, _ in plan.order),
        update=tuple(costs.update(sum(by_name[name].values for name in unit.parameters)) for unit in plan.units),
        data=costs.data,
        lanes=costs.lanes,
        contention=costs.contention,
        drag=costs.drag,
        host=host_seconds(plan, shapes, costs.host, costs.codecs, costs.world) if costs.host.passes else 0.0,
    )


def host_seconds(plan: Plan, shapes: Sequence[Shape], host: Host, costs: Mapping[str, CodecCost], world: int) -> float:
    """Host seconds to issue all work of a step to a GPU under a plan."""
    by_name = {shape.name: shape for shape in shapes}
    total = host.passes
    for unit in plan.units:
        issue = (_measured(unit.codec, costs) or CodecCost()).issue
        total += host.update + unit.partitions * (host.launch + _launch_of(unit, by_name, world).cells * issue)
    return total


def _layers(units: Sequence[Unit], costs: Costs) -> tuple[tuple[Layer, ...], dict[str, int]]:
    """Layers between one unit's first use and the next, and for each unit the layer after whose backward it is ready.

    The backward pass may complete units in another order than the reverse of their use, so the layers of the backward
    pass are cut at the sorted completion times of all units.
    """
    touched = {u.name: min(costs.forward, min(costs.touched.get(p, 0.0) for p in u.parameters)) for u in units}
    complete = {
        u.name: min(costs.backward, max(costs.complete.get(p, costs.backward) for p in u.parameters)) for u in units
    }
    index = {unit.name: at for at, unit in enumerate(units)}
    used = sorted(index, key=lambda name: (touched[name], index[name]))
    ended = sorted(index, key=lambda name: (-complete[name], index[name]))
    starts = [*(touched[name] for name in used), costs.forward]
    ends = [costs.backward, *(complete[name] for name in ended), 0.0]
    layers = [Layer("start", starts[0], ends[0] - ends[1])] + [
        Layer(name, starts[at + 1] - starts[at], ends[at + 1] - ends[at + 2], (index[name],))
        for at, name in enumerate(used)
    ]
    return tuple(layers), {name: at for at, name in enumerate(ended, start=1)}


def job(unit: Unit, shapes: Mapping[str, Shape], costs: Costs, *, index: int = 0, ready: int = 0) -> Job:
    """The simulator's job for one part of a unit (all parts are equal)."""
    members = [shapes[name] for name in unit.parameters]
    one = _launch_of(unit, shapes, costs.world, costs.node)
    values = sum(shape.values for shape in members) / unit.partitions
    carried = carried_cost(unit.codec, unit.exchange, costs)
    cost = carried or cost_of(unit.codec, costs)
    encode, between, decode = (_seconds(line, values, one.cells) for line in (cost.encode, cost.between, cost.decode))
    halves = 2 if len(one.sent) and _merges(unit.codec, unit.exchange) else 1
    if len(one.sent) < 2 and carried is None:
        between = 0.0
    elif len(one.sent) * halves < 2:
        between, decode = 0.0, decode + between  # of an exchange with several hops, which is one message here
    if halves > 1 and carried is None:
        # The measured curves are for an all-gather, where a rank decodes every rank's payload. Here a rank sends its
        # shards, decodes and merges one shard of every payload, encodes the merged shard, and decodes the whole once.
        single, share = decode / costs.world, 1 / costs.world
        between += len(one.sent) * (single * (1 - share) + _seconds(cost.encode, values * share, one.cells))
        decode = single
    if carried is None and costs.node > 1 and _is_hierarchical(unit.exchange) and built(unit.codec).view == "flat":
        # The ranks of a node share the work, and of an all-gather's payloads one per node is decoded.
        gathers = exchanges_to_weigh(unit.codec, 2)[0] == "allgather"
        encode, decode = encode / costs.node, decode / costs.node ** (2 if gathers else 1)
    rounds = tuple(
        Transfer(
            costs.link.latency * messages + _inside_seconds(inside, messages, costs.inside),
            size / halves / costs.link.bytes_per_s,
        )
        for messages, size, inside in zip(one.messages, one.sent, one.inside, strict=True)
        for _ in range(halves)
    )
    return Job(index, ready, encode, rounds, between / max(1, len(rounds) - 1), decode)


def _inside_seconds(nbytes: float, messages: float, link: LinkCost | None) -> float:
    """Seconds inside the nodes, before and after a message between them; the network between is free meanwhile."""
    return messages * link.latency + nbytes / link.bytes_per_s if link is not None and nbytes else 0.0


def _launch_of(unit: Unit, shapes: Mapping[str, Shape], world: int, node: int = 1) -> LaunchTraffic:
    members = [shapes[name] for name in unit.parameters]
    sizes = tuple(shape.shape for shape in members)
    return launch(unit.codec, unit.exchange, sizes, members[0].dtype, unit.partitions, world, node)


def carried_cost(codec: str, carrier: str, costs: Costs) -> CodecCost | None:
    """The measured cost of a codec over an exchange, or None."""
    found = costs.carried.get(over(codec, carrier))
    if found is None and costs.carried:
        same = (spec for spec in costs.specs if built(spec).text == built(codec).text)
        found = next((costs.carried[name] for spec in same if (name := over(spec, carrier)) in costs.carried), None)
    return found


def cost_of(codec: str, costs: Costs) -> CodecCost:
    """The measured cost of a codec, however its spec is written; zero cost if it was not measured."""
    found = _measured(codec, costs.codecs)
    # A run on a CPU measures codecs only over exchanges; these curves are for the first exchange.
    return found or carried_cost(codec, exchanges_to_weigh(codec, 2)[0], costs) or CodecCost()


def _measured(codec: str, costs: Mapping[str, CodecCost]) -> CodecCost | None:
    found = costs.get(codec)
    if found is None:
        found = next((cost for text, cost in costs.items() if built(text).text == built(codec).text), None)
    return found


@lru_cache(maxsize=1024)
def built(codec: str) -> codecs.Codec:
    """`codecs.build`, cached: building runs the codec and takes milliseconds."""
    return codecs.build(codec)


@lru_cache(maxsize=1024)
def exchanges_to_weigh(codec: str, world: int, node: int = 1) -> tuple[str, ...]:
    """Exchanges to compare for a codec: the default one, and those that may send less.

    That is `sharded` if payloads do not add, and `hierarchical` if there are several nodes of several ranks.
    """
    legal = exchange.legal(built(codec))
    both = legal[0] == "allgather" and "sharded" in legal and world > 2
    nested = 1 < node < world and "hierarchical" in legal
    return (legal[0], *["sharded"] * both, *[f"hierarchical(node={node})"] * nested)


def _is_hierarchical(carrier: str) -> bool:
    return exchange.build(carrier).definition.name == "hierarchical"


def _merges(codec: str, carrier: str) -> bool:
    return carrier == "sharded" and exchanges_to_weigh(codec, 2)[0] == "allgather"


def _seconds(line: Curve, values: float, times: int) -> float:
    """Seconds for `values` values in `times` runs of the codec, each with the curve's fixed part."""
    return line(values) + line.fixed * (times - 1) if values else 0.0


@lru_cache(maxsize=65536)
def launch(
    codec: str,
    carrier: str,
    sizes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    parts: int,
    world: int,
    node: int = 1,
) -> LaunchTraffic:
    """Communication of one of `parts` launches of tensors of these sizes: the mean of two late steps."""
    coded, link, scale = built(codec), exchange.build(carrier), 1.0
    if parts == 1:
        batches = codecs.batches(coded, [""] * len(sizes), sizes, small=_SMALL)
        packed = [(batch.shape, batch.lengths) for batch in batches]
    else:
        values = sum(torch.Size(size).numel() for size in sizes) // parts
        packed, scale = [((min(values, _LARGE),), None)], max(1.0, values / _LARGE)
    sent: dict[int, float] = {}
    inside: dict[int, float] = {}
    messages: dict[int, float] = {}
    for step in (LATE, LATE + 1):
        fused: set[tuple[int, object]] = set()
        for shape, lengths in packed:
            for number, one in enumerate(coded.rounds(shape, dtype, step=step, packed=True, lengths=lengths)):
                outer, inner = _sent(link, one, world, node)
                sent[number] = sent.get(number, 0.0) + outer / 2 * scale
                inside[number] = inside.get(number, 0.0) + inner / 2 * scale
                # Payloads that add and have the same coder are sent as one message.
                alone = not one.adds or (number, one.coder) not in fused
                messages[number] = messages.get(number, 0.0) + alone / 2
                fused.add((number, one.coder))
    order = sorted(sent)
    columns = (tuple(column[number] for number in order) for column in (messages, sent, inside))
    return LaunchTraffic(len(packed), *columns)


def _sent(link: exchange.Exchange, one: Round, world: int, node: int) -> tuple[float, float]:
    """Bytes that the busiest node sends for one communication, and that a rank sends inside its node beside that.

    Only a hierarchical exchange sends inside the nodes before and after; the others do so at the same time.
    """
    form = Network(0.0, 1.0, inside=Network(0.0, 1.0))
    # A ring passes each node's boundary once, whatever the number of its ranks; shards of all its ranks do.
    if link.text in _ALIKE and (node == 1 or link.text != "sharded"):
        return form.transfer(link.text, one.nbytes, world).wire, 0.0
    few = min(world, max(2 * node, COUNTED // node * node))
    counted = form.transfer(link.text, 1.0, few).wire
    grown = form.transfer(link.text, 1.0, world).wire / counted if few < world and counted else 1.0
    between, inside = link.node_bytes(one, few, node)
    return between * grown, float(inside) if _is_hierarchical(link.text) else 0.0
