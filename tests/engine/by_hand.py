"""A loop with an all-reduce written by hand, and the same loop attached, with units that arrive late."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline
from syncline import plan

SLOW = "loops.slow_exchange:slow(ms=3)"


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - x[:, :3]).square().mean()


def slow_plan(model: nn.Module) -> plan.Plan:
    """A unit for each module."""
    shapes = [plan.Shape(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
    return plan.default_plan(shapes, exchange=SLOW, group_bytes=0)


def average(model: nn.Module) -> None:
    """What the engine does, in the plain loop."""
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def train(
    rank: int,
    model: nn.Module,
    optimizer: Any,
    steps: range,
    *,
    by_hand: bool,
    after: Callable[[int], Any] | None = None,
) -> list[Any]:
    """Train; `after(step)` runs straight after `optimizer.step()`, with updates in flight. Returns what it returned."""
    seen = []
    for step in steps:
        loss(model, rank, step).backward()
        if by_hand:
            average(model)
        optimizer.step()
        seen.append(after(step) if after is not None else None)
        optimizer.zero_grad()
    return seen


def both(rank: int, case: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """`case(rank, by_hand, attach)` by hand and attached; `attach` does nothing in the first."""
    results = []
    for by_hand in (True, False):
        syncs: list[Any] = []

        def attach(model: nn.Module, *args: Any, by_hand: bool = by_hand, syncs: Any = syncs, **more: Any) -> None:
            if not by_hand:
                more = {"plan": slow_plan(model), **options, **more}
                syncs.append(syncline.attach(model, *args, **more))

        results.append(case(rank, by_hand, attach))
        for sync in syncs:
            sync.close()
    return results[0], results[1]


def values(model: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]
