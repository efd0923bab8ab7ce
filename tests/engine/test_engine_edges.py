"""Loops that DDP cannot run: several backwards over one forward, replaced buffers, parameters of no model."""

from typing import Any

import torch
from loops.models import convnet, wide_mlp
from torch import Tensor, nn

import syncline
from ranks import run_ranks
from syncline.engine.inflight import wait_on_touch
from syncline.plan import default_plan


def flat(model: nn.Module) -> list[float]:
    return [float(v) for t in (*model.parameters(), *model.buffers()) for v in t.detach().flatten()[:20]]


class Running(nn.Module):
    """Keeps a mean in a buffer that it replaces in every forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = wide_mlp()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        out: Tensor = self.inner(x)
        return out


def edges(rank: int, world: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    numbers = torch.Generator().manual_seed(rank)
    torch.manual_seed(0)

    net = convnet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    sync = syncline.attach(net, optimizer)
    for _ in range(9):
        out = net(torch.randn(4, 3, 8, 8, generator=numbers))
        out.square().mean().backward(retain_graph=True)
        out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen["two backwards"] = flat(net)
    sync.close()

    running = Running()
    optimizer = torch.optim.SGD(running.parameters(), lr=0.01)
    sync = syncline.attach(running, optimizer)
    for _ in range(3):
        running(torch.randn(8, 32, generator=numbers)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen["replaced buffers"] = flat(running)
    assert running.mean.abs().max() > 0
    sync.close()

    model, scale = wide_mlp(), nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.01)
    sync = syncline.attach(model, optimizer)
    for _ in range(9):
        (model(torch.randn(8, 32, generator=numbers)) * scale).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.wait()
    assert not wait_on_touch._tickets, "no tensor stays marked"
    seen["others"] = flat(model)
    sync.close()
    return seen


def test_unusual_loops_keep_replicas_equal() -> None:
    first, second = run_ranks(edges, 2)
    assert first == second


def alone(rank: int, world: int) -> list[float]:
    model = wide_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = syncline.attach(model, optimizer, compress="auto")
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    assert sync.auto is None
    sync.replan(default_plan(sync.shapes))
    with sync.no_sync():
        sync.wait()
    sync.load_state_dict(sync.state_dict())
    sync.close()
    return flat(model)


def test_one_rank_is_plain_training() -> None:
    assert run_ranks(alone, 1)
