"""Loops that read, change, keep or own gradients: clipping, noise, hooks, flat buffers, views."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loops.models import mlp
from loops.table import plain, row, train
from loops.ways import Run


@row(core=True)
def clip_grad_norm(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clip(_step: int) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        run.read(norm)
        assert norm > 0.05, "the bound does not bite"

    train(run, optimizer, net, between=clip)


@row(core=True, optimizer="adamw")
def clip_grad_value(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clip(step: int) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        if step == 4:
            assert any((p.grad.abs() == 1e-3).any() for p in model.parameters()), "the bound does not bite"

    train(run, optimizer, net, between=clip)


@row()
def clip_each_parameter(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clip(_step: int) -> None:
        for p in model.parameters():
            nn.utils.clip_grad_norm_(p, 0.02)

    train(run, optimizer, net, between=clip)


@row()
def clip_by_total_norm_without_foreach(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clip(_step: int) -> None:
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=False)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total, foreach=False)

    train(run, optimizer, net, between=clip)


@row()
def adaptive_clipping_by_weights(run: Run) -> None:
    """AGC: reads parameters and gradients together, between backward and step."""
    model, optimizer, net = plain(run)

    def clip(_step: int) -> None:
        for p in model.parameters():
            limit = 0.01 * p.detach().norm().clamp(min=1e-3)
            norm = p.grad.norm()
            p.grad.mul_(torch.where(norm > limit, limit / norm, torch.ones_like(norm)))

    train(run, optimizer, net, between=clip)


@row()
def gradient_noise(run: Run) -> None:
    model, optimizer, net = plain(run)

    def noise(step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad.add_((torch.randn(p.shape, generator=generator) * 1e-3).to(p.device))

    train(run, optimizer, net, between=noise)


@row(optimizer="adamw")
def gradient_centralization(run: Run) -> None:
    model, optimizer, net = plain(run)

    def centralize(_step: int) -> None:
        for p in model.parameters():
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True))

    train(run, optimizer, net, between=centralize)


def _hooked(run: Run, *, before: bool) -> None:
    """Tensor hooks change this rank's gradient before it is accumulated."""
    model = mlp()
    optimizer = run.optimizer(model.parameters())

    def add() -> None:
        for p in model.parameters():
            p.register_hook(lambda g: g * 0.5 - g.mean())

    add() if before else None
    net = run.attach(model, optimizer)
    None if before else add()
    train(run, optimizer, net)


@row()
def tensor_hooks_registered_before_attach(run: Run) -> None:
    _hooked(run, before=True)


@row()
def tensor_hooks_registered_after_attach(run: Run) -> None:
    _hooked(run, before=False)


@row(ddp=False)
def norms_logged_in_hooks_registered_after_attach(run: Run) -> None:
    """A hook sees this rank's own gradient, as it was accumulated."""
    model, optimizer, net = plain(run)
    norms: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda q, n=name: norms.update({n: q.grad.norm()}))
    train(run, optimizer, net, between=lambda _step: run.read(*(norms[n] for n in sorted(norms))))


@row(ddp=False)
def norms_logged_in_hooks_registered_before_attach(run: Run) -> None:
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    norms: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda q, n=name: norms.update({n: q.grad.norm()}))
    net = run.attach(model, optimizer)
    train(run, optimizer, net, between=lambda _step: run.read(*(norms[n] for n in sorted(norms))))


@row()
def full_backward_hooks_of_modules(run: Run) -> None:
    model, optimizer, net = plain(run)
    seen: list[Tensor] = []
    model[2].register_full_backward_hook(lambda _m, grads, _o: seen.append(grads[0].detach().clone()))
    train(run, optimizer, net, between=lambda _step: run.read(seen.pop()))


@row(core=True)
def gradients_read(run: Run) -> None:
    model, optimizer, net = plain(run)
    # Each step from another one on: what is not read is not waited for.
    some = list(model.parameters())
    train(run, optimizer, net, between=lambda step: run.read(*(p.grad for p in some[step % 4 :])))


@row(core=True, optimizer="adamw")
def gradients_edited(run: Run) -> None:
    model, optimizer, net = plain(run)

    def edit(step: int) -> None:
        first, second, *others = model.parameters()
        first.grad.mul_(0.5)
        second.grad = second.grad + 0.01
        others[0].grad = None if step % 3 == 1 else others[0].grad
        others[-1].grad.data.add_(others[-1].data, alpha=0.01)

    train(run, optimizer, net, between=edit)


@row()
def gradients_edited_by_foreach(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, optimizer, net, between=lambda _step: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5))


@row()
def gradients_kept_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss(net, step).backward()
        optimizer.step()
        if step % 2:
            run.read(*(p.grad for p in model.parameters()))


@row()
def gradients_kept_from_the_last_step(run: Run) -> None:
    """The gradient objects of the last step are read after the next backward pass."""
    model, optimizer, net = plain(run)
    last: list[Tensor] = []

    def compare(_step: int) -> None:
        run.read(*last)
        last[:] = [p.grad for p in model.parameters()]

    train(run, optimizer, net, between=compare)


def _flat(run: Run, clear: Callable[[Any, Tensor], None], read: bool) -> None:
    """All gradients are slices of one buffer of the user, as Apex and Megatron keep them."""
    model, optimizer, net = plain(run)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    first = 0
    for p in parameters:
        p.grad = flat[first : first + p.numel()].view(p.shape)
        first += p.numel()
    for step in range(run.steps):
        run.loss(net, step).backward()
        if read:
            run.way.wait()
            run.read(flat)
        optimizer.step()
        run.way.wait()
        clear(optimizer, flat)


@row()
def flat_gradient_buffer(run: Run) -> None:
    _flat(run, lambda _optimizer, flat: flat.zero_(), read=False)


@row()
def flat_gradient_buffer_read_between(run: Run) -> None:
    _flat(run, lambda _optimizer, flat: flat.zero_(), read=True)


@row()
def flat_gradient_buffer_with_zero_grad_to_zeros(run: Run) -> None:
    _flat(run, lambda optimizer, _flat: optimizer.zero_grad(set_to_none=False), read=True)


@row()
def kept_views_of_gradients(run: Run) -> None:
    """Views of gradients that are kept with `set_to_none=False` show every step's averages."""
    model, optimizer, net = plain(run)
    run.loss(net, 0).backward()
    optimizer.step()
    run.way.wait()
    optimizer.zero_grad(set_to_none=False)
    views = [p.grad.view(-1)[:5] for p in model.parameters()]
    for step in range(run.steps):
        run.loss(net, step).backward()
        run.way.wait()
        run.read(*views)
        optimizer.step()
        run.way.wait()
        optimizer.zero_grad(set_to_none=False)


@row()
def gradient_objects_kept_with_zeros(run: Run) -> None:
    model, optimizer, net = plain(run)
    run.loss(net, 0).backward()
    kept = [p.grad for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for step in range(run.steps):
        run.loss(net, step).backward()
        run.read(torch.tensor([p.grad is k for p, k in zip(model.parameters(), kept, strict=True)]), *kept)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@row(ddp=False)
def gradients_by_autograd_grad(run: Run) -> None:
    """`autograd.grad` exchanges nothing: the user averages and sets `p.grad`."""
    model, optimizer, net = plain(run)
    parameters = list(model.parameters())
    for step in range(run.steps):
        for p, grad in zip(parameters, torch.autograd.grad(run.loss(net, step), parameters), strict=True):
            mean = grad / run.world
            dist.all_reduce(mean, group=run.way.group)
            p.grad = mean
        optimizer.step()
        optimizer.zero_grad()


@row()
def gradients_set_from_other_memory(run: Run) -> None:
    model, optimizer, net = plain(run)

    def replace(_step: int) -> None:
        for p in model.parameters():
            p.grad = p.grad.clone().mul_(2)

    train(run, optimizer, net, between=replace)


@row()
def gradients_summed_by_the_user_again(run: Run) -> None:
    """A loop that was written with its own all-reduce, and averages what is averaged already."""
    model, optimizer, net = plain(run)

    def again(_step: int) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad, group=run.way.group)
            p.grad /= run.world

    train(run, optimizer, net, between=again)


@row()
def only_some_gradients_kept(run: Run) -> None:
    """Half of the gradients are dropped before the step."""
    model, optimizer, net = plain(run)

    def drop(step: int) -> None:
        for i, p in enumerate(model.parameters()):
            if (i + step) % 2:
                p.grad = None

    train(run, optimizer, net, between=drop)


@row()
def scaled_by_hand(run: Run) -> None:
    """A loss scale without GradScaler."""
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        (run.loss(net, step) * 1024).backward()
        for p in model.parameters():
            p.grad /= 1024
        optimizer.step()
        optimizer.zero_grad()


@row()
def gradient_statistics_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def look(_step: int) -> None:
        run.read(torch.stack([p.grad.abs().max() for p in model.parameters()]))
        run.read(torch.stack([(p.grad * p).sum() for p in model.parameters()]))

    train(run, optimizer, net, after=look)
