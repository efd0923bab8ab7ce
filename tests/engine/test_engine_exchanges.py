"""Every exchange through the engine trains as one process with all data does, at three and four ranks over 20 steps."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncline
from ranks import run_ranks
from syncline.engine.node_layout import node_numbers, ranks_per_node
from syncline.errors import UsageError

STEPS = 20
EXCHANGES = (
    *("allreduce", "allgather", "sharded", "ring", "gather-scatter", "server", "server(servers=2)"),
    *("hierarchical", "hierarchical(node=2)", "hierarchical(node=2, between=ring)", "server(dedicated=true)"),
)
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 3))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)
    return F.mse_loss(model(x), y)


def flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def attached(rank: int, world: int, exchange: str, kind: str) -> tuple[list[float], str]:
    """This rank's parameters after the training, and the exchange of its plan."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    sync = syncline.attach(model, optimizer, exchange=exchange, tune=False)
    if rank >= sync.trainers:
        sync.serve(STEPS)
    else:
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    sync.close()
    return flat(model), sync.plan.units[0].exchange


def every_exchange(rank: int, world: int) -> dict[str, Any]:
    return {f"{kind} {name}": attached(rank, world, name, kind) for kind in OPTIMIZERS for name in EXCHANGES}


def alone(workers: int, kind: str) -> list[float]:
    """The same training in one process, written by hand."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(STEPS):
        (sum(loss_of(model, rank, step) for rank in range(workers)) / workers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.full), 4])
def test_training_over_every_exchange_equals_one_process(world: int) -> None:
    ranks = run_ranks(every_exchange, world)
    start = flat(net())
    for name in ranks[0]:
        kind, _, exchange = name.partition(" ")
        workers = world - 1 if "dedicated" in exchange else world
        expected = torch.tensor(alone(workers, kind))
        for rank in range(workers):
            assert ranks[rank][name][0] == ranks[0][name][0], f"{name}: ranks 0 and {rank} differ"
            torch.testing.assert_close(torch.tensor(ranks[rank][name][0]), expected, rtol=1e-4, atol=1e-5, msg=name)
        if workers < world:
            assert ranks[-1][name][0] == start, "a dedicated server has updated its parameters"
    # All ranks of this test share a node, so nothing goes between nodes.
    assert ranks[0]["sgd hierarchical"][1] == f"hierarchical(node={world})"
    assert ranks[0]["sgd hierarchical(node=2)"][1] == "hierarchical(node=2)"


def train_on_a_server(rank: int, world: int) -> str:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.attach(model, optimizer, exchange="server(dedicated=true)", timeout=20)
    refused = ""
    try:
        if rank < sync.trainers:
            sync.serve(1)
        else:
            loss_of(model, rank, 0).backward()
    except UsageError as error:
        refused = str(error)
    torch.distributed.barrier()
    # On every rank the mistake came before anything was sent, so that the job can go on.
    if rank < sync.trainers:
        loss_of(model, rank, 0).backward()
        optimizer.step()
    else:
        sync.serve(1)
    sync.close()
    return refused


def test_servers_serve_and_the_others_train() -> None:
    worker, _, server = run_ranks(train_on_a_server, 3)
    assert "rank 0 trains, and serve is for dedicated servers" in worker
    assert "rank 2 is a dedicated server" in server
    assert "sync.serve(steps)" in server


def layout(rank: int, world: int) -> list[int]:
    sync = syncline.attach(net(), exchange="hierarchical")
    found = node_numbers(sync.groups)
    sync.close()
    return found


def test_ranks_of_one_machine_share_a_node() -> None:
    assert run_ranks(layout, 2) == [[0, 0], [0, 0]]
    assert ranks_per_node([0, 0, 0, 1, 1, 1]) == 3
    assert ranks_per_node([0, 1, 2]) == 1
    assert ranks_per_node([0, 0, 1, 1, 2]) == 2
    assert ranks_per_node([0, 1, 1]) is None
    assert ranks_per_node([0, 1, 0, 1]) is None
