"""Buffers are rank 0's before every forward that DDP sends them for: several forwards before a backward."""

import gc
import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from loops.references import Ddp
from loops.ways import Ours
from torch import Tensor, nn

import syncline
from ranks import run_ranks


class Centred(nn.Module):
    """Its output depends on a running mean that every forward in training changes (and, in turns, replaces)."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            new = 0.5 * self.mean + x.detach().mean(0)
            if int(self.count) % 2:
                self.mean = new
            else:
                self.mean.copy_(new)
            self.count += 1
        out: Tensor = self.inner(x - self.mean.clone())
        return out


def loop(way: Any, rank: int) -> list[Tensor]:
    """Outputs of all kinds of forwards, and this rank's buffers where a training forward has just ended."""
    inner = Centred()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    net = way.attach(inner, (optimizer,), False)
    numbers = torch.Generator().manual_seed(rank)
    seen: list[Tensor] = []

    def forward() -> Tensor:
        out: Tensor = net(torch.randn(4, 16, generator=numbers))
        seen.extend([out.detach().clone(), inner.mean.clone(), inner.count.clone()])
        return out

    for step in range(4):
        forward()  # its loss is thrown away
        first, second = forward(), forward()
        (first.square().mean() + second.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with way.no_sync(inner):
            forward().square().mean().backward()
            forward().square().mean().backward()
        forward().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            inner.eval()
            with torch.no_grad():
                forward()
                forward()
            inner.train()
        if step == 2:
            with torch.no_grad():
                forward()  # changes the buffers, and the next forward has each rank's own
    way.close()
    return seen


def both(rank: int, world: int) -> list[int]:
    results = []
    for make in (Ddp, partial(Ours, way="fine")):
        way: Any = make(dist.group.WORLD)
        results.append(loop(way, rank))
        del way
        gc.collect()
    return [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]


def test_every_forward_has_the_buffers_that_it_has_with_ddp() -> None:
    assert run_ranks(both, 2) == [[], []]


def edited(rank: int, world: int) -> list[str]:
    """What the engine says in a loop that changes a buffer before its third forward."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("syncline").addHandler(handler)
    net = Centred()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = syncline.attach(net, optimizer, tune=False)
    counts = []
    for step in range(4):
        if step == 2:
            net.mean.add_(1)
        net(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.eval()(torch.randn(4, 16))
        net.train()
        counts.append(len([text for text in said if "buffers were changed" in text]))
    sync.close()
    return [str(count) for count in counts]


def test_a_buffer_that_the_user_changes_is_remarked_on() -> None:
    assert run_ranks(edited, 2)[0] == ["0", "0", "1", "1"]
