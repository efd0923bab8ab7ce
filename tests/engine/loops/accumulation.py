"""Loops with several backward passes for a step, skipped steps, and every way to clear gradients."""

import pytest
import torch
import torch.nn.functional as F

from loops.models import mlp
from loops.table import plain, row, train
from loops.ways import WAYS, Run


@row(core=True)
def accumulation(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        with run.no_sync(model):
            run.loss(net, step, 0).backward()
            run.loss(net, step, 1).backward()
        run.loss(net, step, 2).backward()
        optimizer.step()
        optimizer.zero_grad()


# DDP averages the first mean again together with the second gradient; so does `attach`, in another order of rounding.
@row(core=True, optimizer="adamw", rounds=WAYS)
def accumulation_without_no_sync(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step, 0).backward()
        run.loss(net, step, 1).backward()
        run.read(*(p.grad for p in model.parameters())) if step == 3 else None
        optimizer.step()
        optimizer.zero_grad()


@row(rounds=WAYS)
def accumulation_of_changing_length(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        for micro in range(step % 3):
            with run.no_sync(model):
                (run.loss(net, step, micro) / (step % 3 + 1)).backward()
        run.loss(net, step, 5).backward()
        optimizer.step()
        optimizer.zero_grad()


@row()
def forward_outside_no_sync_and_backward_inside(run: Run) -> None:
    """Only the forward's place counts for DDP, only the backward's for us: both inside, the last one outside."""
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        with run.no_sync(model):
            losses = [run.loss(net, step, micro) for micro in range(2)]
            sum(losses).backward()
        run.loss(net, step, 2).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(ddp=False)
def two_losses_with_two_backward_calls(run: Run) -> None:
    """One graph, two losses: the shared layers get their gradient in two passes."""
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        x, y = run.batch(step)
        out = net(x)
        run.noted(F.mse_loss(out[:, :5], y[:, :5])).backward(retain_graph=True)
        run.noted(F.l1_loss(out[:, 5:], y[:, 5:])).backward()
        optimizer.step()
        optimizer.zero_grad()


@row()
def retained_graph_used_once(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


@row(core=True, optimizer="adamw")
def forward_twice_before_backward(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        (run.loss(net, step) + 0.5 * run.loss(net, step, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


@row()
def backward_by_autograd_with_gradients_of_outputs(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        x, y = run.batch(step)
        out = net(x)
        run.noted(F.mse_loss(out.detach(), y))
        torch.autograd.backward([out], [(out.detach() - y) / y.numel()])
        optimizer.step()
        optimizer.zero_grad()


@row(core=True)
def skipped_steps(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward()
        if step % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()


@row(optimizer="adamw")
def steps_skipped_by_clearing_gradients(run: Run) -> None:
    """`step()` is called all the same, and finds no gradients."""
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward()
        if step % 3 == 1:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def _zeroed(run: Run, how: str) -> None:
    model, optimizer, net = plain(run)

    def zero(step: int) -> None:
        if step % 3 != 1:
            return
        for p in model.parameters():
            if how == "zero_":
                p.grad.zero_()
            elif how == "zeros_like":
                p.grad = torch.zeros_like(p)
        if how == "zero_grad":
            optimizer.zero_grad(set_to_none=False)

    train(run, optimizer, net, between=zero)


@row()
def steps_skipped_by_zeroing_gradients(run: Run) -> None:
    _zeroed(run, "zero_")


@row()
def steps_skipped_by_zero_grad_to_zeros(run: Run) -> None:
    _zeroed(run, "zero_grad")


@row()
def steps_skipped_by_new_zero_gradients(run: Run) -> None:
    _zeroed(run, "zeros_like")


@row()
def batch_skipped_when_not_finite(run: Run) -> None:
    """A broken batch: its gradients are dropped after a look at them."""
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        loss = run.loss(net, step)
        (loss * float("nan") if step == 2 else loss).backward()
        if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()


@row(core=True, optimizer="adamw")
def zero_grad_before_backward(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss(net, step).backward()
        optimizer.step()


@row()
def zero_grad_after_forward(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        loss = run.loss(net, step)
        model.zero_grad()
        loss.backward()
        optimizer.step()


@row(core=True)
def zero_grad_to_zeros(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@row(optimizer="adamw")
def zero_grad_by_hand(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None


@row()
def zero_grad_by_hand_in_place(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.detach_()
            p.grad.zero_()


@row(rounds=WAYS)
def gradients_never_cleared(run: Run) -> None:
    """Every step adds to the last one's gradient."""
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()


@row()
def step_called_twice(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, optimizer, net, between=lambda _step: optimizer.step())
    run.read(*model.parameters())


@row()
def step_before_the_first_backward(run: Run) -> None:
    _, optimizer, net = plain(run)
    optimizer.step()
    train(run, optimizer, net)


@row()
def last_batch_is_smaller(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step, shape=(8 if step < 4 else 3, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()


@row()
def backward_that_fails_and_is_tried_again(run: Run) -> None:
    """An error of the user's own code inside backward, on every rank, before any gradient."""
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        if step == 2:
            loss = run.loss(net, step)
            loss.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("out of memory")))
            with pytest.raises(RuntimeError, match="out of memory"):
                loss.backward()
            optimizer.zero_grad()
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
