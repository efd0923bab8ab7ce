"""A plan and cost curves as a scenario of the simulator: what would a step take?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from syncline import codecs, exchange
from syncline.codecs.build import LATE, Round
from syncline.plan.costs import CodecCost, Costs, Curve, Host, over
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit
from syncline.sim import Job, Layer, Network, Outcome, Scenario, Transfer, simulate

# As the engine groups tensors within a unit.
_SMALL = 16384
# Trying a codec out takes a millisecond: parts of more values than this send in proportion to one of so many.
_LARGE = 1 << 18
# Where all ranks send alike a closed form tells how much; else the exchange is run for each rank, without data.
_ALIKE = {"allreduce", "allgather", "sharded", "ring"}


@dataclass(frozen=True)
class Launch:
    """What one launch of a unit puts on the wire: for each round how many messages, and what the busiest rank sends."""

    cells: int
    """How many times the codec runs in it."""
    messages: tuple[float, ...]
    sent: tuple[float, ...]


def predict(plan: Plan, shapes: Sequence[Shape], costs: Costs, *, spans: bool = False) -> Outcome:
    """What the simulator says of a step under this plan."""
    return simulate(scenario(plan, shapes, costs), spans=spans)


def scenario(plan: Plan, shapes: Sequence[Shape], costs: Costs) -> Scenario:
    """Layers lie between the first uses of the plan's units; launches cost what their codec and bytes cost."""
    by_name = {shape.name: shape for shape in shapes}
    layers, ready = _layers(plan.units, costs)
    index = {unit.name: at for at, unit in enumerate(plan.units)}
    made = {u.name: job(u, by_name, costs, index=index[u.name], ready=ready[u.name]) for u in plan.units}
    return Scenario(
        layers=layers,
        jobs=tuple(made[name] for name, _ in plan.order),
        update=tuple(costs.update(sum(by_name[name].values for name in unit.parameters)) for unit in plan.units),
        data=costs.data,
        tail=costs.tail,
        lanes=costs.lanes,
        contention=costs.contention,
        drag=costs.drag,
        host=host_seconds(plan, shapes, costs.host, costs.codecs, costs.world) if costs.host.passes else 0.0,
    )


def host_seconds(plan: Plan, shapes: Sequence[Shape], host: Host, costs: Mapping[str, CodecCost], world: int) -> float:
    """Seconds in which a host gives a GPU all of a step under a plan."""
    by_name = {shape.name: shape for shape in shapes}
    total = host.passes
    for unit in plan.units:
        issue = (_measured(unit.codec, costs) or CodecCost()).issue
        total += host.update + unit.partitions * (host.launch + _launch_of(unit, by_name, world).cells * issue)
    return total


def _layers(units: Sequence[Unit], costs: Costs) -> tuple[tuple[Layer, ...], dict[str, int]]:
    """A layer between one unit's first use and the next's; and after which layer's backward each unit is ready.

    The backward pass may complete units in another order than the reverse of their use, so its layers are cut by the
    sorted times of completion, whichever unit these are of.
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
    """One part of a unit (they are all alike) as the simulator sees it."""
    members = [shapes[name] for name in unit.parameters]
    one = _launch_of(unit, shapes, costs.world)
    values = sum(shape.values for shape in members) / unit.partitions
    carried = carried_cost(unit.codec, unit.exchange, costs)
    cost = carried or cost_of(unit.codec, costs)
    encode, between, decode = (_seconds(line, values, one.cells) for line in (cost.encode, cost.between, cost.decode))
    halves = 2 if len(one.sent) and _merges(unit.codec, unit.exchange) else 1
    if len(one.sent) < 2 and carried is None:
        between = 0.0
    elif len(one.sent) * halves < 2:
        between, decode = 0.0, decode + between  # of an exchange in several hops, which here is one message
    if halves > 1 and carried is None:
        # The curves are those of an all-gather, where a rank decodes every rank's payload. Here it sends its shards,
        # decodes and merges a share of every payload, encodes the merged share, and decodes the whole once.
        single, share = decode / costs.world, 1 / costs.world
        between += len(one.sent) * (single * (1 - share) + _seconds(cost.encode, values * share, one.cells))
        decode = single
    rounds = tuple(
        Transfer(costs.link.latency * messages, size / halves / costs.link.bytes_per_s)
        for messages, size in zip(one.messages, one.sent, strict=True)
        for _ in range(halves)
    )
    return Job(index, ready, encode, rounds, between / max(1, len(rounds) - 1), decode)


def _launch_of(unit: Unit, shapes: Mapping[str, Shape], world: int) -> Launch:
    members = [shapes[name] for name in unit.parameters]
    sizes = tuple(shape.shape for shape in members)
    return launch(unit.codec, unit.exchange, sizes, members[0].dtype, unit.partitions, world)


def carried_cost(codec: str, carrier: str, costs: Costs) -> CodecCost | None:
    """What was measured of a codec over an exchange, if it was."""
    found = costs.carried.get(over(codec, carrier))
    if found is None and costs.carried:
        same = (spec for spec in costs.specs if built(spec).text == built(codec).text)
        found = next((costs.carried[name] for spec in same if (name := over(spec, carrier)) in costs.carried), None)
    return found


def cost_of(codec: str, costs: Costs) -> CodecCost:
    """The measured cost of a codec, whichever way its spec is written; nothing for one that was not measured."""
    found = _measured(codec, costs.codecs)
    # Of a run on a CPU the codec is known over exchanges alone; the first is the one that these curves are of.
    return found or carried_cost(codec, carriers(codec, 2)[0], costs) or CodecCost()


def _measured(codec: str, costs: Mapping[str, CodecCost]) -> CodecCost | None:
    found = costs.get(codec)
    if found is None:
        found = next((cost for text, cost in costs.items() if built(text).text == built(codec).text), None)
    return found


@lru_cache(maxsize=1024)
def built(codec: str) -> codecs.Codec:
    """`codecs.build`, which tries a codec out and takes milliseconds, once for each spec."""
    return codecs.build(codec)


@lru_cache(maxsize=1024)
def carriers(codec: str, world: int) -> tuple[str, ...]:
    """The exchanges worth weighing: the default; and sharded, if payloads do not add and it sends less."""
    legal = exchange.legal(built(codec))
    both = legal[0] == "allgather" and "sharded" in legal and world > 2
    return (legal[0], "sharded") if both else (legal[0],)


def _merges(codec: str, carrier: str) -> bool:
    return carrier == "sharded" and carriers(codec, 2)[0] == "allgather"


def _seconds(line: Curve, values: float, times: int) -> float:
    """`values` in so many runs of the codec, each with the curve's fixed part."""
    return line(values) + line.fixed * (times - 1) if values else 0.0


@lru_cache(maxsize=65536)
def launch(
    codec: str, carrier: str, sizes: tuple[tuple[int, ...], ...], dtype: torch.dtype, parts: int, world: int
) -> Launch:
    """What one launch of tensors of these sizes sends, in `parts` parts: the mean of two late steps."""
    coded, link, scale = built(codec), exchange.build(carrier), 1.0
    if parts == 1:
        packed = [batch.shape for batch in codecs.batches(coded, [""] * len(sizes), sizes, small=_SMALL)]
    else:
        values = sum(torch.Size(size).numel() for size in sizes) // parts
        packed, scale = [(min(values, _LARGE),)], max(1.0, values / _LARGE)
    sent: dict[int, float] = {}
    messages: dict[int, float] = {}
    for step in (LATE, LATE + 1):
        fused: set[tuple[int, object]] = set()
        for shape in packed:
            for number, one in enumerate(coded.rounds(shape, dtype, step=step, packed=True)):
                sent[number] = sent.get(number, 0.0) + _sent(link, one, world) / 2 * scale
                # Payloads that add up and are written alike travel as one message.
                alone = not one.adds or (number, one.coder) not in fused
                messages[number] = messages.get(number, 0.0) + alone / 2
                fused.add((number, one.coder))
    order = sorted(sent)
    return Launch(len(packed), tuple(messages[n] for n in order), tuple(sent[n] for n in order))


def _sent(link: exchange.Exchange, one: Round, world: int) -> float:
    """Bytes that the busiest rank sends for one communication."""
    if link.text in _ALIKE:
        return Network(0.0, 1.0).transfer(link.text, one.nbytes, world).wire
    return max(link.sent_bytes(one, world))
