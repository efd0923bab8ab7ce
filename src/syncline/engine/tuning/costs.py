"""What a running job costs, as numbers that all ranks have: the profile of its steps, its link, its codecs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline import exchange
from syncline.engine.tuning.probe_busy import beside_compute, busy_latency, carried_cost, drag
from syncline.engine.tuning.probe_link import codec_cost, line_of, link_samples
from syncline.engine.tuning.profile import Profile
from syncline.plan.costs import CodecCost, Costs, Curve, Host, LinkCost, over
from syncline.plan.frozen import trained
from syncline.plan.planner import ALWAYS
from syncline.plan.predict import built, exchanges_to_weigh, host_seconds
from syncline.plan.table import Plan
from syncline.plan.unit import Shape

if TYPE_CHECKING:
    from syncline.engine.sync import Sync

_HEAD = 8
"""Numbers of a profile's table that are not a parameter's."""
_LARGEST_S = 0.1
"""A dense exchange of the largest flat gradient that codecs are tried on takes about so long."""
_FLAT = 1 << 16, 1 << 18, 1 << 20
"""Values of a small flat gradient, and the least and the most of a large one."""


def agreed(sync: "Sync", mine: Sequence[float]) -> list[float]:
    """The ranks' mean of each number: the same bits on all of them."""
    rows: Tensor = sync.groups.gather(torch.tensor(mine, dtype=torch.float64))
    means: list[float] = rows.mean(0).tolist()
    return means


def measured(sync: "Sync", profile: Profile, allowed: Sequence[str] | None, shapes: Sequence[Shape]) -> Costs:
    """What plans of these parameters are made from.

    `allowed` are the codecs to choose from beside those that always are, None for none.
    """
    table = agreed(sync, profile.table())
    names = [slot.name for slot in sync.slots]
    head, rest = table[:_HEAD], table[_HEAD:]
    plan, values = trained(sync.plan, shapes), sum(shape.values for shape in shapes)
    planned = sorted({row.codec for row in plan.units})
    specs = planned if allowed is None else list(dict.fromkeys([*ALWAYS, *allowed]))
    cpu = sync.device.type == "cpu"
    link = measured_link(sync)
    matrices = _matrices(shapes)
    tried = {} if cpu else _codecs(sync, specs, matrices)
    host = Host()
    if not cpu:
        host, tried = host_of(plan, shapes, tried, sync.world, *head[5:])
    return Costs(
        world=sync.world,
        forward=head[1],
        backward=head[2],
        touched=dict(zip(names, rest[: len(names)], strict=True)),
        complete=dict(zip(names, rest[len(names) :], strict=True)),
        link=link,
        codecs=tried,
        carried=_carried(sync, specs, link, matrices, stretch=head[4]) if cpu else {},
        update=Curve(0.0, head[3] / max(1, values)),
        data=head[0],
        lanes=sync.executor.lanes,
        # On the CPU codec work takes the cores that compute wants; a GPU has room beside it, mostly.
        contention=1.0 if cpu else 0.1,
        drag=_drag(sync, link) if cpu else 0.0,
        host=host,
    )


def host_of(
    plan: Plan, shapes: Sequence[Shape], tried: Mapping[str, CodecCost], world: int,
    passes: float, launches: float, updates: float,
) -> tuple[Host, dict[str, CodecCost]]:  # fmt: skip
    """Of what the host spent on a profiled step under a plan, the share of each launch and update.

    A codec that was tried out by itself may have taken longer than in its launches: then all codecs' `issue` shrinks,
    so that what is predicted of this very plan is what was measured of it.
    """
    count = sum(unit.partitions for unit in plan.units)
    coded = host_seconds(plan, shapes, Host(), tried, world)
    scale = min(1.0, launches / coded) if coded else 1.0
    scaled = {spec: replace(cost, issue=cost.issue * scale) for spec, cost in tried.items()}
    return Host(passes, max(0.0, launches - coded) / max(1, count), updates / max(1, len(plan.units))), scaled


def measured_link(sync: "Sync") -> LinkCost:
    """The link as it is now. On the CPU, with the latencies that it has while the ranks compute."""
    probe = dense_link(sync)
    samples = agreed(sync, [n for pair in link_samples(probe, sync.device) for n in pair])
    latency, rate = line_of(list(zip(samples[::2], samples[1::2], strict=True)))
    if sync.device.type == "cpu":
        (latency,) = agreed(sync, [beside_compute(lambda: busy_latency(probe, rate))[0]])
    return LinkCost(latency, rate)


def dense_link(sync: "Sync") -> Any:
    """An all-reduce over one of the job's groups."""
    links = next(iter(sync.links.values()))
    return links[0] if str(links[0].exchange) == "allreduce" else exchange.connect("allreduce", links[0].group)


def _drag(sync: "Sync", link: LinkCost) -> float:
    return agreed(sync, [drag(dense_link(sync), link.bytes_per_s, lambda: sync.groups.agree("", "ranks"))])[0]


def _matrices(trained: Sequence[Shape]) -> list[tuple[int, ...]]:
    """Some shapes of what trains, up to the largest."""
    shapes = sorted({s.shape for s in trained if len(s.shape) > 1}, key=lambda s: torch.Size(s).numel())
    chosen = [shapes[len(shapes) * k // 4] for k in (1, 3)] + shapes[-1:] if shapes else [(1 << 16,)]
    return list(dict.fromkeys(chosen))


def _codecs(sync: "Sync", specs: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> dict[str, CodecCost]:
    return {spec: _same(sync, codec_cost(spec, shapes, sync.world, sync.device)) for spec in specs}


def _carried(
    sync: "Sync", specs: Sequence[str], link: LinkCost, matrices: Sequence[tuple[int, ...]], *, stretch: float
) -> dict[str, CodecCost]:
    """Codecs over each exchange that is weighed for them, or that the plan has."""
    group = dense_link(sync).group
    small, least, most = _FLAT
    sent = 2 * (sync.world - 1) / sync.world * 4
    large = int(min(most, max(least, _LARGEST_S * link.bytes_per_s / sent)))
    planned = {(row.codec, row.exchange) for row in sync.plan.units}
    pairs = {(spec, carrier) for spec in specs for carrier in exchanges_to_weigh(spec, sync.world)} | {
        pair for pair in planned if pair[0] in specs
    }

    def work() -> dict[str, CodecCost]:
        found: dict[str, CodecCost] = {}
        for spec, carrier in sorted(pairs):
            shapes = matrices if built(spec).view == "matrix" else [(small,), (large,)]
            line = exchange.connect(carrier, group)
            found[over(spec, carrier)] = carried_cost(spec, line, shapes, rank=sync.rank, stretch=stretch)
        return found

    return {name: _same(sync, cost) for name, cost in beside_compute(work)[0].items()}


def _same(sync: "Sync", cost: CodecCost) -> CodecCost:
    lines = (cost.encode, cost.between, cost.decode)
    numbers = agreed(sync, [*(n for line in lines for n in (line.fixed, line.each)), cost.issue])
    return CodecCost(*(Curve(*numbers[i : i + 2]) for i in (0, 2, 4)), issue=numbers[6])
