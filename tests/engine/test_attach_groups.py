"""`attach` on some of the ranks: another process group, and one dimension of a device mesh."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import syncline
from ranks import run_ranks
from syncline.errors import UsageError

FEW, TUNED = 3, 9
"""Steps; the more suffice to tune, for the probes are the group's alone, too."""


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 4))


def flat(model: nn.Module) -> list[float]:
    return [float(v) for p in model.parameters() for v in p.detach().flatten()]


def train(rank: int, group: Any, steps: int) -> list[float]:
    """Every rank begins with a model of its own: the first of the group gives it to the others."""
    model = model_of(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.attach(model, optimizer, process_group=group, tune=steps == TUNED)
    for step in range(steps):
        model(inputs(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = flat(model)
    sync.close()
    return values


def expected(ranks: list[int], steps: int) -> list[float]:
    """The same training by hand: the mean of the members' gradients, from the first member's model."""
    model = model_of(ranks[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            (model(inputs(rank, step)).square().mean() / len(ranks)).backward()
        optimizer.step()
    return flat(model)


def rows_and_columns(rank: int, world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    try:
        syncline.attach(model_of(0), process_group=mesh)
        refused = ""
    except UsageError as error:
        refused = str(error)
    return {"refused": refused, "row": train(rank, mesh["data"], FEW), "column": train(rank, mesh["pipe"], FEW)}


def test_one_dimension_of_a_mesh() -> None:
    found = run_ranks(rows_and_columns, 4)
    for rank, seen in enumerate(found):
        assert seen["refused"] == "a mesh of 2 dimensions was given: name one, mesh['pipe'], mesh['data']"
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        for what, members in (("row", row), ("column", column)):
            assert seen[what] == found[members[0]][what], f"replicas of {what} {members} are equal"
            torch.testing.assert_close(seen[what], expected(members, FEW), rtol=1e-4, atol=1e-6)
    assert found[0]["row"] != found[2]["row"], "each row trains its own"


def some_ranks(rank: int, world: int) -> list[float] | None:
    group = dist.new_group([1, 3])
    return train(rank, group, TUNED) if rank in (1, 3) else None


def test_a_group_without_rank_0() -> None:
    nobody, first, nobody_else, second = run_ranks(some_ranks, 4)
    assert nobody is nobody_else is None
    assert first == second
    torch.testing.assert_close(first, expected([1, 3], TUNED), rtol=1e-4, atol=1e-6)
