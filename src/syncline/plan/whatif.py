"""Predict a measured job on another network: other bandwidths and numbers of ranks.

Closed forms (`sim.Network`) scale the latencies and bytes of an exchange from the recorded number of ranks, so
predicting 10,000 ranks takes no longer than predicting two. Compute and batch size per rank stay the same.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.errors import UsageError
from syncline.plan.candidates import groupings, plans, renumber_parts
from syncline.plan.costs import CodecCost, Costs, Curve, LinkCost
from syncline.plan.launch_order import arrange, greedy_launch_order
from syncline.plan.planner import ALWAYS, QUICK, WORTH, Choice, Weighed, search
from syncline.plan.predict import built, exchanges_to_weigh, scenario
from syncline.plan.table import Plan
from syncline.plan.unit import Fact, Shape, Unit
from syncline.sim import Network, Outcome, Scenario, Transfer, simulate

COUNTED, STAND_IN = 16, 8
"""Up to `COUNTED` ranks the planner counts bytes exactly; beyond, it counts them for `STAND_IN` ranks and scales."""
SWEEP_GROUP_SIZES = (1 << 18, 1 << 20, 16 << 20)
"""Group sizes, in bytes, that a sweep tries."""
LAUNCHES = 100
"""A sweep skips plans with more launches, unless the model has more units than that."""


@dataclass(frozen=True)
class TargetNetwork:
    """The network to predict for: number of ranks, and bytes per second of each link in a collective."""

    ranks: int
    bytes_per_s: float
    tree: bool = False
    """Latencies grow with log2(n), as in a tree; else with n-1, as in a ring."""
    latency: float = 1.0
    """Factor on the measured latency: 0 on an infinite network."""

    def __post_init__(self) -> None:
        if self.ranks < 2 or not self.bytes_per_s > 0:
            raise UsageError(f"{self.ranks} ranks at {self.bytes_per_s:g} bytes/s: use 2 or more, and more than 0")


def recorded(costs: Costs, *, tree: bool = False) -> TargetNetwork:
    """The network on which the costs were measured."""
    return TargetNetwork(costs.world, costs.link.bytes_per_s, tree)


def infinite(target: TargetNetwork) -> TargetNetwork:
    """The same number of ranks on a network that takes no time."""
    return replace(target, bytes_per_s=math.inf, latency=0.0)


def at(costs: Costs, target: TargetNetwork) -> Costs:
    """The costs converted to another network."""
    form = Network(1.0, 1.0, tree=target.tree)
    hops = form.transfer("allreduce", 1.0, target.ranks).latency / form.transfer("allreduce", 1.0, costs.world).latency
    more = target.ranks / costs.world
    return replace(
        costs,
        world=target.ranks,
        link=LinkCost(costs.link.latency * hops * target.latency, target.bytes_per_s),
        **_decoded(costs, more),  # type: ignore[arg-type]
    )


def outcome(plan: Plan, shapes: Sequence[Shape], costs: Costs, target: TargetNetwork) -> Outcome:
    """Simulate this plan on another network."""
    return simulate(_scenario(plan, shapes, at(costs, target)))


def choose(
    shapes: Sequence[Shape],
    costs: Costs,
    target: TargetNetwork,
    *,
    allowed: Sequence[str] = (),
    only: str | None = None,
) -> Choice:
    """The planner's answer for another network. `only`: the best plan with this codec, compared with dense and bf16."""
    there = at(costs, target)
    if target.ranks > COUNTED:
        made = _large(shapes, there, list(allowed) if only is None else [only])
    elif only is None:
        made = search(shapes, there, allowed=allowed)
    else:
        extra = [name for name in (only,) if name not in ALWAYS]
        made = search(shapes, there, allowed=extra, mix=False)
    if only is None:
        return made
    text = built(only).text
    mine = next(weighed for weighed in made.alternatives if weighed.name == text)
    dense = next(weighed for weighed in made.alternatives if weighed.name == "none")
    return Choice(
        plan=replace(mine.plan, about=_about(mine)),
        step=mine.step,
        bound=outcome(mine.plan, shapes, costs, target).bound,
        alternatives=made.alternatives,
        why=f"{text} was asked for: {mine.step * 1e3:.1f} ms a step against {dense.step * 1e3:.1f} ms dense",
    )


@dataclass(frozen=True)
class Cell:
    """Predicted steps, in seconds, for one number of ranks and one bandwidth; `codec` is the best compressed one."""

    ranks: int
    bytes_per_s: float
    dense: float
    bf16: float
    compressed: float
    codec: str

    @property
    def gain(self) -> float:
        """How many times faster the best compressed step is than the better of dense and bf16."""
        return min(self.dense, self.bf16) / self.compressed

    @property
    def pays(self) -> bool:
        """Whether the planner would choose compression beyond bf16."""
        return self.gain > 1 / (1 - WORTH)


def sweep(
    shapes: Sequence[Shape], costs: Costs, targets: Iterable[TargetNetwork], *, compressed: Sequence[str]
) -> list[Cell]:
    """One cell per target. For each codec it tries some groupings, exchanges and parts in greedy order only."""
    if not compressed:
        raise UsageError("no compressed codec was measured: run syncline train --strategy 'syncline(auto(int8))' first")
    units = groupings(shapes, SWEEP_GROUP_SIZES)
    cells = []
    for target in targets:
        there = at(costs, target)
        best = {name: _quick(units, shapes, there, name) for name in dict.fromkeys([*ALWAYS, *compressed])}
        codec = min(compressed, key=lambda name: best[name])
        cells.append(Cell(target.ranks, target.bytes_per_s, best["none"], best["bf16"], best[codec], codec))
    return cells


def stops_paying(cells: Sequence[Cell]) -> Mapping[int, float | None]:
    """By number of ranks: bytes per second above which compression does not pay, interpolated between cells.

    0 if it pays in none of these cells, None if it still pays in the one with the fastest links.
    """
    found: dict[int, float | None] = {}
    for ranks in sorted({cell.ranks for cell in cells}):
        row = sorted((cell for cell in cells if cell.ranks == ranks), key=lambda cell: -cell.bytes_per_s)
        last = next((n for n, cell in enumerate(row) if cell.pays), None)
        found[ranks] = 0.0 if last is None else _between(row[last], row[last - 1]) if last else None
    return found


def _large(shapes: Sequence[Shape], costs: Costs, allowed: Sequence[str]) -> Choice:
    """Like `search`, without mixtures of codecs; bytes are scaled from a few ranks."""
    names = list(dict.fromkeys(built(name).text for name in (*ALWAYS, *allowed)))
    units = groupings(shapes)
    best = [_longer(units, shapes, costs, name) for name in names]
    chosen = best[0]
    for entry in best[1:]:
        chosen = entry if entry.step < chosen.step * (1 - WORTH) else chosen
    told = simulate(_scenario(chosen.plan, shapes, costs))
    dense = f" against {best[0].step * 1e3:.1f} ms dense" if chosen is not best[0] else ""
    said = "do not compress: dense" if chosen is best[0] else chosen.name
    why = (
        f"{said}: {chosen.step * 1e3:.1f} ms a step{dense};"
        f" compute {told.compute * 1e3:.1f} ms, wire {told.wire * 1e3:.1f} ms"
    )
    ordered = tuple(sorted(best, key=lambda entry: entry.step))
    return Choice(replace(chosen.plan, about=_about(chosen)), chosen.step, told.bound, ordered, why)


def _about(entry: Weighed) -> dict[str, Fact]:
    return {"predicted_ms": round(entry.step * 1e3, 3), "chosen": entry.name}


def _longer(units: Sequence[tuple[Unit, ...]], shapes: Sequence[Shape], costs: Costs, codec: str) -> Weighed:
    looked: list[tuple[float, int, Plan, Scenario]] = []
    for plan in _tried(units, shapes, costs, codec):
        base = _scenario(plan, shapes, costs)
        looked.append((simulate(base.ordered(greedy_launch_order(base))).step, len(looked), plan, base))
    _, _, plan, base = min(looked, key=lambda entry: entry[:2])
    order, step = arrange(base, launches=QUICK)
    return Weighed(codec, replace(plan, order=renumber_parts([plan.order[i] for i in order])), step)


def _quick(units: Sequence[tuple[Unit, ...]], shapes: Sequence[Shape], costs: Costs, codec: str) -> float:
    steps = []
    for plan in _tried(units, shapes, costs, codec):
        if len(plan.order) > max(LAUNCHES, len(plan.units)):
            continue
        base = _scenario(plan, shapes, costs)
        steps.append(simulate(base.ordered(greedy_launch_order(base))).step)
    return min(steps)


def _tried(units: Sequence[tuple[Unit, ...]], shapes: Sequence[Shape], costs: Costs, codec: str) -> Iterator[Plan]:
    by_name = {shape.name: shape for shape in shapes}
    for grouping in units:
        yield from plans(grouping, by_name, _counted(costs), codec)


def _counted(costs: Costs) -> Costs:
    """The costs for a number of ranks whose bytes can be counted, with decode times for as many payloads."""
    if costs.world <= COUNTED:
        return costs
    fewer = STAND_IN / costs.world
    return replace(costs, world=STAND_IN, **_decoded(costs, fewer))  # type: ignore[arg-type]


def _scenario(plan: Plan, shapes: Sequence[Shape], costs: Costs) -> Scenario:
    """`predict.scenario` for any number of ranks: the bytes of each launch grow with its exchange's closed form."""
    few = _counted(costs)
    base = scenario(plan, shapes, few)
    if few is costs:
        return base
    form = Network(0.0, 1.0)
    units = {unit.name: unit for unit in plan.units}
    jobs = []
    for (name, _), job in zip(plan.order, base.jobs, strict=True):
        unit = units[name]
        ranks = costs.world, few.world
        grown = form.transfer(unit.exchange, 1.0, ranks[0]).wire / form.transfer(unit.exchange, 1.0, ranks[1]).wire
        rounds = tuple(Transfer(one.latency, one.wire * grown) for one in job.rounds)
        # Only in an all-gather does every rank decode all payloads.
        decode = job.decode * (costs.world / few.world if unit.exchange == "allgather" else 1.0)
        jobs.append(replace(job, rounds=rounds, decode=decode))
    return base.with_(jobs=tuple(jobs))


def _decoded(costs: Costs, more: float) -> dict[str, dict[str, CodecCost]]:
    """Codec costs for `more` times as many ranks; costs without an exchange are for the codec's first exchange."""
    plain = {name: _decoding(exchanges_to_weigh(name, 2)[0], cost, more) for name, cost in costs.codecs.items()}
    carried = {name: _decoding(name.rpartition(" ")[2], cost, more) for name, cost in costs.carried.items()}
    return {"codecs": plain, "carried": carried}


def _decoding(carrier: str, cost: CodecCost, more: float) -> CodecCost:
    """In an all-gather every rank decodes all payloads, which is also most of what its host issues."""
    if more == 1 or carrier != "allgather":
        return cost
    decode = Curve(cost.decode.fixed * more, cost.decode.each * more)
    return replace(cost, decode=decode, issue=cost.issue * more)


def _between(slow: Cell, fast: Cell) -> float:
    """The bandwidth where the gain, linear in its logarithm, falls to the least that is worth it."""
    share = (slow.gain - 1 / (1 - WORTH)) / (slow.gain - fast.gain)
    return math.exp(math.log(slow.bytes_per_s) + share * math.log(fast.bytes_per_s / slow.bytes_per_s))
