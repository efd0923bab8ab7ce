"""Measured costs of a running job for the planner: step profile, network, codecs, host time; equal on all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from syncline import exchange
from syncline.engine.launch.capture import can_capture
from syncline.engine.node_layout import node_numbers, ranks_per_node
from syncline.engine.protocols import EngineView
from syncline.engine.tuning.probe_codec import cost_alone, cost_captured, cost_over_link
from syncline.engine.tuning.probe_link import (
    busy_latency,
    compute_slowdown,
    inside_nodes,
    link_samples,
    while_computing,
)
from syncline.engine.tuning.profile import Profile, ProfileTable
from syncline.plan.costs import CodecCost, Costs, Curve, Host, LinkCost, over
from syncline.plan.frozen_parameters import trained
from syncline.plan.planner import ALWAYS
from syncline.plan.predict import built, exchanges_to_weigh, host_seconds
from syncline.plan.table import Plan
from syncline.plan.unit import Shape
from syncline.sim import fit

_LARGEST_S = 0.05
"""About the time of a dense exchange of the largest flat gradient that codecs are tried on."""
_FLAT = 1 << 16, 1 << 18, 1 << 20
"""Values of a small flat gradient, and the least and the most of a large one."""


def mean_over_ranks(engine: EngineView, numbers: Sequence[float]) -> list[float]:
    """The mean of each number over all ranks, bit for bit the same on each of them."""
    rows: Tensor = engine.groups.gather(torch.tensor(numbers, dtype=torch.float64))
    means: list[float] = rows.mean(0).tolist()
    return means


def measure_costs(
    engine: EngineView, profile: Profile, allowed: Sequence[str] | None, shapes: Sequence[Shape]
) -> Costs:
    """All costs that a plan of these parameters is made from.

    `allowed` are the codecs to choose from besides those that are always candidates; None: the codecs stay.
    """
    table = ProfileTable.from_numbers(mean_over_ranks(engine, profile.table().numbers()))
    names = [slot.name for slot in engine.slots]
    plan, values = trained(engine.plan, shapes), sum(shape.values for shape in shapes)
    planned = sorted({row.codec for row in plan.units})
    specs = planned if allowed is None else list(dict.fromkeys([*ALWAYS, *allowed]))
    on_cpu = engine.device.type == "cpu"
    link = measure_link(engine)
    node = shared_by(engine)
    matrices = _matrices(shapes)
    host, alone = Host(), {}
    if not on_cpu:
        found = {spec: cost_alone(spec, matrices, world=engine.world, device=engine.device) for spec in specs}
        alone = {spec: _mean_cost(engine, cost) for spec, cost in found.items()}
        host, alone = host_costs(plan, shapes, alone, engine.world, table)
        alone |= _captured_costs(engine, specs, matrices)
    return Costs(
        world=engine.world,
        forward=table.forward,
        backward=table.backward,
        touched=dict(zip(names, table.touched, strict=True)),
        complete=dict(zip(names, table.complete, strict=True)),
        link=link,
        codecs=alone,
        carried=_costs_over_links(engine, specs, link, matrices, stretch=table.stretch, node=node) if on_cpu else {},
        update=Curve(0.0, table.update / max(1, values)),
        data=table.data,
        lanes=engine.executor.lanes,
        # On the CPU codec work takes cores away from compute; a GPU mostly has room for both.
        contention=1.0 if on_cpu else 0.1,
        drag=_slowdown(engine, link) if on_cpu else 0.0,
        host=host,
        node=node,
        inside=measure_inside(engine, node),
    )


def _captured_costs(
    engine: EngineView, specs: Sequence[str], matrices: Sequence[tuple[int, ...]]
) -> dict[str, CodecCost]:
    """The costs of codecs whose launches are captured. They were profiled without: a plan has just begun then."""
    captured = [spec for spec in specs if engine.capture_stream is not None and can_capture(built(spec))]
    if not captured:
        return {}
    from syncline.engine.executors.graphs import GraphTape

    with torch.cuda.stream(engine.capture_stream):  # its libraries have their workspaces already
        tape = GraphTape(engine.device)
        where: dict[str, Any] = {"world": engine.world, "device": engine.device, "tape": tape}
        found = {spec: cost_captured(spec, matrices, **where) for spec in captured}
    return {spec: _mean_cost(engine, cost) for spec, cost in found.items()}


def host_costs(
    plan: Plan, shapes: Sequence[Shape], codecs: Mapping[str, CodecCost], world: int, table: ProfileTable
) -> tuple[Host, dict[str, CodecCost]]:
    """The host's time per launch and per update, from profiled steps under a plan; and the codecs, scaled to fit.

    A codec may have taken longer in its probe than in its launches. Then `issue` of all codecs is scaled down, so that
    the prediction for this plan equals the measurement.
    """
    launches = sum(unit.partitions for unit in plan.units)
    coded = host_seconds(plan, shapes, Host(), codecs, world)
    scale = min(1.0, table.host_launches / coded) if coded else 1.0
    scaled = {spec: replace(cost, issue=cost.issue * scale) for spec, cost in codecs.items()}
    launch = max(0.0, table.host_launches - coded) / max(1, launches)
    return Host(table.host_passes, launch, table.host_updates / max(1, len(plan.units))), scaled


def shared_by(engine: EngineView) -> int:
    """Ranks per node, if there are several nodes and all have equally many; else 1: each rank counts by itself."""
    found = ranks_per_node(node_numbers(engine.groups))
    return found if found is not None and found < engine.world else 1


def measure_link(engine: EngineView) -> LinkCost:
    """The network between nodes as it is now; on the CPU, with the latency that it has while ranks compute."""
    return _link_cost(engine, dense_link(engine), ranks=engine.world)


def measure_inside(engine: EngineView, node: int) -> LinkCost | None:
    """The links inside nodes of `node` ranks, all nodes at once; None if each rank has its own."""
    if node == 1:
        return None
    return _link_cost(engine, exchange.connect(inside_nodes(node), dense_link(engine).group), ranks=node)


def _link_cost(engine: EngineView, probe: exchange.Link, *, ranks: int) -> LinkCost:
    """Latency and bandwidth of sums over `ranks` ranks that go through a link."""
    samples = mean_over_ranks(engine, [n for pair in link_samples(probe, engine.device, ranks=ranks) for n in pair])
    network = fit(list(zip(samples[::2], samples[1::2], strict=True)))
    latency = network.latency
    if engine.device.type == "cpu":
        busy, _ = while_computing(lambda: busy_latency(probe, network.bytes_per_s, ranks=ranks))
        (latency,) = mean_over_ranks(engine, [busy])
    return LinkCost(latency, network.bytes_per_s)


def dense_link(engine: EngineView) -> exchange.Link:
    """An all-reduce over one of the job's groups."""
    link = next(iter(engine.links.values()))[0]
    return link if str(link.exchange) == "allreduce" else exchange.connect("allreduce", link.group)


def _slowdown(engine: EngineView, link: LinkCost) -> float:
    mine = compute_slowdown(dense_link(engine), link.bytes_per_s, lambda: engine.groups.agree("", "ranks"))
    return mean_over_ranks(engine, [mine])[0]


def _matrices(trained: Sequence[Shape]) -> list[tuple[int, ...]]:
    """Some shapes of trained parameters, up to the largest."""
    shapes = sorted({s.shape for s in trained if len(s.shape) > 1}, key=lambda s: torch.Size(s).numel())
    chosen = [shapes[len(shapes) * k // 4] for k in (1, 3)] + shapes[-1:] if shapes else [(1 << 16,)]
    return list(dict.fromkeys(chosen))


def _costs_over_links(
    engine: EngineView,
    specs: Sequence[str],
    link: LinkCost,
    matrices: Sequence[tuple[int, ...]],
    *,
    stretch: float,
    node: int,
) -> dict[str, CodecCost]:
    """Costs of codecs over each exchange that the planner considers for them, or that the plan has."""
    group = dense_link(engine).group
    small, least, most = _FLAT
    sent = 2 * (engine.world - 1) / engine.world * 4
    large = int(min(most, max(least, _LARGEST_S * link.bytes_per_s / sent)))
    pairs = {(spec, pattern) for spec in specs for pattern in exchanges_to_weigh(spec, engine.world, node)}
    pairs |= {(row.codec, row.exchange) for row in engine.plan.units if row.codec in specs}

    def measure() -> dict[str, CodecCost]:
        found: dict[str, CodecCost] = {}
        for spec, pattern in sorted(pairs):
            shapes = matrices if built(spec).view == "matrix" else [(small,), (large,)]
            probe = exchange.connect(pattern, group)
            found[over(spec, pattern)] = cost_over_link(spec, probe, shapes, rank=engine.rank, stretch=stretch)
        return found

    return {name: _mean_cost(engine, cost) for name, cost in while_computing(measure)[0].items()}


def _mean_cost(engine: EngineView, cost: CodecCost) -> CodecCost:
    lines = (cost.encode, cost.between, cost.decode)
    numbers = mean_over_ranks(engine, [*(n for line in lines for n in (line.fixed, line.each)), cost.issue])
    return CodecCost(*(Curve(*numbers[i : i + 2]) for i in (0, 2, 4)), issue=numbers[6])
