"""Gradients whose memory autograd shares or reads again: the engine must not overwrite that memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline
from ranks import run_ranks

SIDE = 96


class Viewed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))

    def forward(self):
        return self.weight[None]


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(SIDE, 64)), nn.Parameter(torch.randn(64, SIDE))

    def forward(self):
        return (self.a @ self.b)[None]


class Sums(nn.Module):
    """Sums of views: `position` and `segment` have one gradient, and `product` reads that of `plain`."""

    def __init__(self):
        super().__init__()
        self.position, self.segment, self.plain = Viewed(), Viewed(), Viewed()
        self.product, self.last = Product(), nn.Linear(SIDE, 8)

    def forward(self, x):
        return self.last(x + (self.position() + self.segment()) + (self.product() + self.plain()))


def errors(rank, world, codec):
    torch.manual_seed(0)
    model, plain = Sums(), Sums()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    units = [
        syncline.plan.Unit(name, (*parameters,), codec=codec)
        for name, parameters in (
            ("position", ["position.weight"]),
            ("segment", ["segment.weight"]),
            ("plain", ["plain.weight"]),
            ("rest", ["product.a", "product.b", "last.weight", "last.bias"]),
        )
    ]
    sync = syncline.attach(model, optimizer, plan=syncline.plan.Plan(tuple(units), tuple((u.name, 0) for u in units)))
    worst = 0.0
    shared = False
    for step in range(4):
        torch.manual_seed(100 + step * world + rank)
        x = torch.randn(2, SIDE, SIDE) * (1 + rank)
        plain.zero_grad()
        plain(x).square().mean().backward()
        shared |= plain.position.weight.grad.data_ptr() == plain.segment.weight.grad.data_ptr()
        model(x).square().mean().backward()
        sync.wait()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            mean = other.grad.clone()
            dist.all_reduce(mean)
            mean /= world
            worst = max(worst, float((mine.grad - mean).norm() / mean.norm()))
        optimizer.step()
        optimizer.zero_grad()
    sync.close()
    return worst, shared


@pytest.mark.parametrize(("codec", "most"), [("none", 1e-6), ("bf16", 0.005)])
def test_shared_memory_is_not_overwritten(codec, most):
    for worst, shared in run_ranks(errors, 2, codec):
        assert shared, "autograd has given one memory to two gradients"
        assert worst < most
