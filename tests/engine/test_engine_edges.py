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


def taking_over(rank: int, world: int) -> list[float]:
    """Parts that are frozen when the model is attached train alone later."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    sync = syncline.attach(model, optimizer, compress="int8", tune=False)
    for step in range(4):
        for number, part in enumerate(model):
            part.requires_grad_(number == (step < 2))
        model[step < 2](torch.ones(2, 8) * (rank + 1 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.wait()
    found = [*flat(model), float(sync.step)]
    sync.close()
    return found


def test_parts_that_were_frozen_at_attach_are_averaged_when_they_train() -> None:
    first, second = run_ranks(taking_over, 2)
    assert first == second, "replicas stay equal"
    assert first[-1] == 4, "every step counts"


def skipping(rank: int, world: int) -> tuple[list[str], list[str], bool]:
    """GradScaler tells a fused optimizer to skip a step."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    sync = syncline.attach(model, optimizer, compress="topk(ratio=0.1)", tune=False)
    before, kept = flat(model), []
    for broken in (1.0, 0.0):
        model(torch.ones(2, 64) * (rank + 1)).square().mean().backward()
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.full((), broken)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        optimizer.zero_grad()
        kept.append([key for key in sync.state_dict() if key.endswith(".error")])
        if broken:
            unchanged = flat(model) == before
    sync.close()
    return kept[0], kept[1], unchanged


def test_a_step_that_a_fused_optimizer_skips_leaves_the_residuals() -> None:
    for skipped, stepped, unchanged in run_ranks(skipping, 2):
        assert unchanged, "the optimizer did skip"
        assert skipped == []
        assert "weight.error" in stepped


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
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    sync.close()
    return flat(model)


def test_one_rank_is_plain_training() -> None:
    assert run_ranks(alone, 1)
