"""Two emulated nodes of two ranks: who shares a node, bytes between nodes against theory, and the planner's choice."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline
from syncline.cluster.capabilities import capabilities
from syncline.cluster.nodes import Cluster
from syncline.cluster.ranks import Place, Report, run_ranks
from syncline.engine.node_layout import node_numbers
from syncline.train.rank.network_counters import read_counters

RANKS, NODE = 4, 2
COUNTED = 3
WIDTH = 300
DENSE = 4 * (WIDTH * WIDTH + WIDTH) * 2
"""Bytes of the gradients."""
BETWEEN = {
    ("none", "allreduce"): 1.5 * DENSE,  # 2 (N-1)/N of a ring of four
    ("none", "hierarchical"): 1.0 * DENSE,  # what one node has summed
    ("int8", "sharded"): 2.0 * DENSE / 4,  # both ranks of a node send to both of the other
    ("int8", "hierarchical"): 1.0 * DENSE / 4,
}
"""By codec and exchange: bytes that a node sends to the other in a step."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def join(place: Place, store: str) -> None:
    torch.set_num_threads(1)
    group = dist.FileStore(store, RANKS)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=group, rank=place.rank, world_size=RANKS, timeout=limit)


def count_bytes(place: Place, store: str, report: Report) -> dict[str, Any]:
    join(place, store)
    found: dict[str, Any] = {"bytes": {}}
    for codec, exchange in BETWEEN:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        sync = syncline.attach(net, optimizer, compress=codec, exchange=exchange, tune=False, sentinel=0)
        train(net, optimizer, place.rank, 1)
        sync.wait()
        dist.barrier()
        before = read_counters()
        dist.barrier()  # the other rank of the node has not sent anything yet
        train(net, optimizer, place.rank, COUNTED)
        sync.wait()
        dist.barrier()
        found["bytes"][codec, exchange] = read_counters().per_step_since(before, steps=COUNTED)
        found["nodes"] = node_numbers(sync.groups)
        sync.close()
    dist.destroy_process_group()
    return found


def choose(place: Place, store: str, report: Report) -> dict[str, Any]:
    join(place, store)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    sync = syncline.attach(net, optimizer, compress="auto(bf16)", tune="full")
    train(net, optimizer, place.rank, 10)
    assert sync.auto is not None
    found = {"chosen": {unit.exchange for unit in sync.auto.choice.plan.units}, "costs": sync.auto.costs}
    sync.close()
    dist.destroy_process_group()
    return found


def on_two_nodes(run: Callable[..., dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What `run` returns on each rank of two nodes of two ranks, connected by 50 Mbit/s."""
    able = capabilities()
    if not (able.can_namespaces and able.can_shape):
        pytest.skip(able.why)
    with Cluster(RANKS // NODE, bandwidth="50Mbit") as cluster:
        places = [
            Place(rank, RANKS, rank % NODE, node=rank // NODE, netns=node.netns,
                  environment={"GLOO_SOCKET_IFNAME": node.interface})
            for rank in range(RANKS) for node in [cluster.nodes[rank // NODE]]
        ]  # fmt: skip
        return run_ranks(run, places, str(folder / "store"), logs=folder)


@pytest.mark.namespaces
@pytest.mark.timeout(100)
def test_bytes_between_nodes(tmp_path: Path) -> None:
    for found in on_two_nodes(count_bytes, tmp_path):
        assert found["nodes"] == [0, 0, 1, 1]
        for kind, theory in BETWEEN.items():
            seen = found["bytes"][kind]
            # Headers of packets, acknowledgements, and the engine's own few messages.
            assert theory < seen.sent < 1.12 * theory + 8000, f"{kind}: {seen.sent} of {theory}"
            assert theory < seen.received < 1.12 * theory + 8000, f"{kind}: {seen.received} of {theory}"


@pytest.mark.namespaces
@pytest.mark.alone  # on busy cores, messages inside a node are as slow as those between nodes
@pytest.mark.timeout(100)
def test_the_planner_chooses_hierarchical(tmp_path: Path) -> None:
    for found in on_two_nodes(choose, tmp_path):
        assert found["chosen"] == {"hierarchical(node=2)"}, found["costs"]
        assert found["costs"].node == NODE
        assert found["costs"].inside.bytes_per_s > 5 * found["costs"].link.bytes_per_s
