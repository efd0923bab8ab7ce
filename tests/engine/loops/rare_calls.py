"""Loops with calls of torch that few people make: collectives in the graph, changed modules, odd backward passes."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import prune
from torch.optim.swa_utils import update_bn

from loops.models import convnet, mlp
from loops.table import plain, row, train
from loops.ways import DEVICE, Run


class Gathered(torch.autograd.Function):
    """The embeddings of all ranks; the backward pass adds up their gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


@row(together=2)
def contrastive_loss_with_gathered_embeddings(run: Run) -> None:
    """The user's own collectives run in forward and inside the backward pass, beside the engine's."""
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        x, _ = run.batch(step)
        mine = F.normalize(net(x), dim=1)
        every: Tensor = Gathered.apply(mine, run.way.group)
        labels = torch.arange(len(mine), device=DEVICE[0]) + len(mine) * dist.get_rank(run.way.group)
        run.noted(F.cross_entropy(mine @ every.T * 5, labels)).backward()
        optimizer.step()
        optimizer.zero_grad()


class WithAuxiliaryHead(nn.Module):
    """A head that helps in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.helper = nn.Linear(32, 40), nn.Linear(40, 10), nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        out: Tensor = self.head(h)
        return out + 0.1 * self.helper(h) if "helper" in self._modules else out


@row()
def auxiliary_head_deleted_mid_run(run: Run) -> None:
    """The optimizer still has its parameters: nobody uses them any more."""
    model = WithAuxiliaryHead()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, unused=True)

    def delete(step: int) -> None:
        if step == 1:
            del model.helper

    train(run, optimizer, net, after=delete)


@row()
def pruned_mid_run(run: Run) -> None:
    """The parameter gets another name, and the module's weight is computed before each forward."""
    model, optimizer, net = plain(run)

    def change(step: int) -> None:
        if step == 1:
            prune.l1_unstructured(model[0], "weight", amount=0.3)
            prune.random_unstructured(model[2], "bias", amount=3)
        if step == 3:
            run.read(model[0].weight, model[0].weight_orig)

    torch.manual_seed(7)
    train(run, optimizer, net, after=change)


@row()
def layer_reset_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def reset(step: int) -> None:
        if step == 2:
            torch.manual_seed(8)
            model[2].reset_parameters()
            nn.init.orthogonal_(model[4].weight)

    train(run, optimizer, net, after=reset)


@row(cuda=False)
def shared_with_other_processes_while_attached(run: Run) -> None:
    """As a user does who gives the model to an evaluating process: its memory moves."""
    model, optimizer, net = plain(run)
    train(run, optimizer, net, after=lambda step: model.share_memory() if step == 1 else None)
    run.read(torch.tensor(all(p.is_shared() for p in model.parameters())))


# The layout of gradients and parameters differs then, so DDP warns.
@row(ddp=False)
def memory_format_changed_while_attached(run: Run) -> None:
    model, optimizer, net = plain(run, convnet)

    def change(step: int) -> None:
        if step == 1:
            model.to(memory_format=torch.channels_last)

    train(run, optimizer, net, after=change, shape=(8, 3, 8, 8))


@row()
def hook_on_several_gradients(run: Run) -> None:
    """It is called when the gradients of all its tensors are known, before they are accumulated."""
    model, optimizer, net = plain(run)
    seen: list[Tensor] = []

    def note(gradients: Any) -> None:
        seen.extend(g.norm() for g in gradients if g is not None)

    register_multi_grad_hook([model[0].weight, model[6].bias], note)
    train(run, optimizer, net)
    run.read(*seen)


@row()
def backward_without_threads_of_autograd(run: Run) -> None:
    _, optimizer, net = plain(run)
    with torch.autograd.set_multithreading_enabled(False):
        train(run, optimizer, net)


# DDP waits for the other parameters. A stack of matrices is rounded differently from single ones.
@row(ddp=False, rounds=("powersgd",))
def backward_with_some_inputs(run: Run) -> None:
    """Only these parameters get gradients, other ones in each step."""
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, unused=True)
    parameters = list(model.parameters())
    for step in range(run.steps):
        run.loss(net, step).backward(inputs=parameters[step % 3 :: 3])
        run.read(torch.tensor([p.grad is None for p in parameters]))
        optimizer.step()
        optimizer.zero_grad()


@row()
def two_losses_in_one_call(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        x, y = run.batch(step)
        out = net(x)
        first, second = F.mse_loss(out, y), out.abs().mean(0)
        torch.autograd.backward([run.noted(first), second], [None, torch.full_like(second, 0.01)])
        optimizer.step()
        optimizer.zero_grad()


@row()
def statistics_estimated_between_steps(run: Run) -> None:
    """`update_bn` runs the model in training mode, without gradients, right after a step."""
    model, optimizer, net = plain(run, convnet)

    def estimate(step: int) -> None:
        if step % 2:
            batches = [run.batch(step, micro, shape=(8, 3, 8, 8))[0] for micro in (3, 4)]
            update_bn(batches, model)
            run.read(*(model.buffers() if run.rank == 0 else ()))

    train(run, optimizer, net, after=estimate, shape=(8, 3, 8, 8))


class TooLarge(Exception):
    """In place of an error of memory."""


@row()
def batch_skipped_after_a_forward_that_failed(run: Run) -> None:
    """The first layers have run, and changed their buffers."""
    model, optimizer, net = plain(run, convnet)
    failing = [False]

    def fail(*_: Any) -> None:
        if failing[0]:
            raise TooLarge

    model[-1].register_forward_pre_hook(fail)
    for step in range(run.steps):
        failing[0] = step in (1, 3)
        try:
            run.loss(net, step, shape=(8, 3, 8, 8)).backward()
        except TooLarge:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


def _counted(call: Any, calls: list[int], *args: Any, **kwargs: Any) -> Any:
    calls.append(1)
    return call(*args, **kwargs)


@row(optimizer="adamw")
def methods_wrapped_by_the_user(run: Run) -> None:
    """`optimizer.step` and `zero_grad` are replaced on the object, before attach and after it."""
    model = mlp()
    optimizer: Any = run.optimizer(model.parameters())
    calls: list[int] = []
    optimizer.step = partial(_counted, optimizer.step, calls)
    net = run.attach(model, optimizer)
    optimizer.zero_grad = partial(_counted, optimizer.zero_grad, calls)
    optimizer.step = partial(_counted, optimizer.step, calls)
    train(run, optimizer, net)
    run.read(torch.tensor(len(calls)))


@row()
def head_tied_to_another_layer_mid_run(run: Run) -> None:
    """One parameter is put in the place of another, which the optimizer still has."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, unused=True)

    def tie(step: int) -> None:
        if step == 1:
            model[2].weight = model[0].weight

    train(run, optimizer, net, after=tie)


@row()
def trained_under_no_grad_but_for_the_forward(run: Run) -> None:
    """The whole loop is decorated; gradients are switched on for forward and backward alone."""
    _, optimizer, net = plain(run)
    with torch.no_grad():
        for step in range(run.steps):
            with torch.enable_grad():
                loss = run.loss(net, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
