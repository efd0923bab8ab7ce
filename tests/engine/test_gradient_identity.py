"""Gradients as the user holds them: flat buffers, kept objects and views, hooks; compared with torch's DDP."""

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from loops.references import Ddp
from loops.ways import Ours
from torch import Tensor, nn

import syncline
from ranks import run_ranks

STEPS, LR = 5, 0.1
Seen = list[Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 10))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step * 17 + rank)
    return torch.randn(8, 32, generator=numbers), torch.randn(8, 10, generator=numbers)


def backward(net: nn.Module, step: int, rank: int) -> None:
    x, y = batch(step, rank)
    F.mse_loss(net(x), y).backward()


def flat_buffer(net: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Seen:
    """Gradients are views of one buffer, which alone is read, scaled and zeroed."""
    parameters = list(inner.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    views = [f.view_as(p) for f, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
    for p, view in zip(parameters, views, strict=True):
        p.grad = view
    seen = []
    for step in range(STEPS):
        backward(net, step, rank)
        seen.append(flat.clone())
        flat.mul_(1 / max(1.0, float(flat.norm())))
        optimizer.step()
        flat.zero_()
        assert all(p.grad is view for p, view in zip(parameters, views, strict=True))
    return seen


def kept_objects(net: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Seen:
    """`zero_grad(set_to_none=False)` keeps the objects and their memory, with updates in flight or not."""
    kept: list[Tensor] = []
    seen = []
    for step in range(STEPS):
        backward(net, step, rank)
        grads = [p.grad for p in inner.parameters() if p.grad is not None]
        kept = kept or grads
        assert all(a is b for a, b in zip(kept, grads, strict=True))
        if step == 2:  # a skipped step: zeroed with the exchange in flight
            optimizer.zero_grad(set_to_none=False)
            continue
        if step == 3:
            seen += [g.clone() for g in kept]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if step == 4:
            seen += [g.clone() for g in kept]
            assert not any(g.any() for g in kept)
    return seen


def kept_views(net: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Seen:
    """Views made once, after the first backward, show every later average and zero the gradients."""
    views: list[Tensor] = []
    seen = []
    for step in range(STEPS):
        backward(net, step, rank)
        views = views or [p.grad.view(-1) for p in inner.parameters() if p.grad is not None]
        seen += [view.clone() for view in views]
        optimizer.step()
        for view in views:
            view.zero_()
    return seen


def views_in_hooks(net: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Seen:
    """Hooks that were registered late see this rank's own gradient, change it, and keep views of it."""
    local: Seen = []
    views: list[Tensor] = []

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        local.append(p.grad.clone())
        p.grad.mul_(2)
        views.append(p.grad.view(-1))

    handles = [p.register_post_accumulate_grad_hook(hook) for p in inner.parameters()]
    seen = []
    for step in range(STEPS):
        views.clear()
        backward(net, step, rank)
        seen += [view.clone() for view in views]
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    return [*local, *seen]


def gradients_put_by_hooks(net: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Seen:
    """A hook moves every gradient into memory of its own."""
    own = {p: torch.zeros(2, *p.shape) for p in inner.parameters()}

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        own[p][1].copy_(p.grad)
        p.grad = own[p][1]

    handles = [p.register_post_accumulate_grad_hook(hook) for p in inner.parameters()]
    seen = []
    for step in range(STEPS):
        backward(net, step, rank)
        seen += [memory[1].clone() for memory in own.values()]
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    return seen


def tensor_hooks(net: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Seen:
    """Hooks on the tensor change the gradient, and read what was accumulated before."""
    before: list[bool] = []

    def halve(p: Tensor, grad: Tensor) -> Tensor:
        before.append(p.grad is None or not p.grad.any())
        return grad / 2

    handles = [p.register_hook(lambda grad, p=p: halve(p, grad)) for p in inner.parameters()]
    seen = []
    for step in range(STEPS):
        backward(net, step, rank)
        seen += [p.grad.clone() for p in inner.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    for handle in handles:
        handle.remove()
    return [torch.tensor(before), *seen]


LOOPS: dict[str, Callable[..., Seen]] = {
    f.__name__: f for f in (flat_buffer, kept_objects, kept_views, views_in_hooks, gradients_put_by_hooks, tensor_hooks)
}


def both_ways(rank: int, world: int) -> dict[str, list[str]]:
    """For every loop, where `attach` differs from DDP."""
    problems: dict[str, list[str]] = {}
    for name, loop in LOOPS.items():
        results = []
        for make in (Ddp, partial(Ours, way="fine")):
            inner = model()
            optimizer = torch.optim.SGD(inner.parameters(), lr=LR, momentum=0.9)
            way: Any = make(dist.group.WORLD)
            try:
                net = way.attach(inner, (optimizer,), False)
                seen = loop(net, inner, optimizer, rank)
                results.append([*seen, *(p.detach().clone() for p in inner.parameters())])
            finally:
                way.close()
            del net
            gc.collect()
        want, got = results
        assert len(want) == len(got), name
        problems[name] = [f"tensor {i} of {len(want)}" for i in range(len(want)) if not torch.equal(want[i], got[i])]
    return problems


def remarks(rank: int, world: int) -> list[str]:
    """Gradients that nobody else holds are not waited for, whatever memory the engine gave them."""
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("syncline").addHandler(handler)
    for compress in (None, "bf16", "powersgd(rank=2)"):
        inner = model()
        optimizer = torch.optim.SGD(inner.parameters(), lr=LR)
        sync = syncline.attach(inner, optimizer, compress=compress, tune=False)
        for step in range(STEPS):
            backward(inner, step, rank)
            nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
            # Gloo's thread may hold a message for a moment after it has arrived.
            until = time.monotonic() + 10
            while any(unit.has_unknown_views() for unit in sync.units):
                assert time.monotonic() < until, "step() would wait"
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 == 0)
        sync.close()
    return said


def test_gradients_that_nobody_shares_are_not_waited_for() -> None:
    said = run_ranks(remarks, 2)[0]
    assert any("gradients are read" in text for text in said)
    assert not [text for text in said if "share memory" in text]


def hook_errors(rank: int, world: int) -> list[str]:
    """What hooks cannot do, and what a step after the error gives."""
    errors = []
    for fault in ("reads another", "removes"):
        inner = model()
        first, last = inner[0].weight, inner[4].weight
        optimizer = torch.optim.SGD(inner.parameters(), lr=LR)
        plan = syncline.plan.default_plan(
            [syncline.plan.Shape(n, tuple(p.shape), p.dtype) for n, p in inner.named_parameters()], group_bytes=0
        )
        sync = syncline.attach(inner, optimizer, plan=plan)

        def hook(p: Tensor, fault: str = fault, last: Tensor = last) -> None:
            if fault == "removes":
                p.grad = None
            else:
                assert last.grad is not None
                last.grad.norm()

        first.register_post_accumulate_grad_hook(hook)
        try:
            backward(inner, 0, rank)
        except syncline.UsageError as error:
            errors.append(str(error))
        sync.close(reuse_groups=False)
    return errors


def test_hooks_that_would_make_ranks_train_apart_raise() -> None:
    for reads, removes in run_ranks(hook_errors, 2):
        assert "a hook read .grad of a parameter that is being averaged ('4.weight', '4.bias')" in reads
        assert "a hook of '0.weight' removed its gradient before it was averaged over the ranks" in removes


@pytest.fixture(scope="module")
def differences() -> list[dict[str, list[str]]]:
    return run_ranks(both_ways, 2)


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_where_ddp_has_them(loop: str, differences: list[dict[str, list[str]]]) -> None:
    assert [d[loop] for d in differences] == [[], []]
