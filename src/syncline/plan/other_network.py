"""Predict a measured job on another network: other bandwidths and numbers of ranks.

Closed forms (`sim.Network`) scale the latencies and bytes of an exchange from the recorded number of ranks, so
predicting 10,000 ranks takes no longer than predicting two. Compute and batch size per rank stay the same.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.errors import UsageError
from syncline.plan.candidates import groupings
from syncline.plan.costs import CodecCost, Costs, Curve, LinkCost
from syncline.plan.errors import Budget, Errors
from syncline.plan.planner import ALWAYS, WORTH, Choice, candidates, labelled, search
from syncline.plan.predict import built, exchanges_to_weigh, predict
from syncline.plan.table import Plan
from syncline.plan.unit import Shape
from syncline.sim import Network, Outcome

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
    # Costs without an exchange are for the codec's first one.
    plain = {name: _decoding(exchanges_to_weigh(name, 2)[0], cost, more) for name, cost in costs.codecs.items()}
    carried = {name: _decoding(name.rpartition(" ")[2], cost, more) for name, cost in costs.carried.items()}
    link = LinkCost(costs.link.latency * hops * target.latency, target.bytes_per_s)
    node = costs.node if costs.node < target.ranks else 1
    return replace(costs, world=target.ranks, link=link, codecs=plain, carried=carried, node=node)


def outcome(plan: Plan, shapes: Sequence[Shape], costs: Costs, target: TargetNetwork) -> Outcome:
    """Simulate this plan on another network."""
    return predict(plan, shapes, at(costs, target))


def choose(
    shapes: Sequence[Shape],
    costs: Costs,
    target: TargetNetwork,
    *,
    allowed: Sequence[str] = (),
    only: str | None = None,
    errors: Errors | None = None,
    budget: Budget | None = None,
) -> Choice:
    """The planner's answer for another network. `only`: the best plan with this codec, compared with dense and bf16.

    `errors` and `budget` are those of `search`; one codec that is asked for has no budget.
    """
    there = at(costs, target)
    if only is None:
        return search(shapes, there, allowed=allowed, errors=errors, budget=budget)
    made = search(shapes, there, allowed=[only], mix=False)
    text = built(only).text
    mine = next(weighed for weighed in made.alternatives if weighed.name == text)
    dense = next(weighed for weighed in made.alternatives if weighed.name == "none")
    return Choice(
        plan=labelled(mine),
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
        best = {
            name: candidates(units, shapes, there, name, launches=LAUNCHES)[0][0]
            for name in dict.fromkeys([*ALWAYS, *compressed])
        }
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
