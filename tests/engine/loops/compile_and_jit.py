"""Loops with `torch.compile`, TorchScript and activation checkpointing."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from loops.models import Raw, mlp, scripted
from loops.table import plain, row, train
from loops.ways import WAYS as ALL
from loops.ways import Run

# Tracing is slow: one way that shows missing waits, and one with a codec.
WAYS = ("fine", "powersgd")


def small() -> nn.Sequential:
    """Two layers: less to trace."""
    return nn.Sequential(nn.Linear(32, 34), nn.Tanh(), nn.Linear(34, 10))


def _compiled(what: Any) -> Any:
    return torch.compile(what, backend="eager")


@row(steps=4, ways=WAYS)
def compiled_then_attached(run: Run) -> None:
    model = small()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(_compiled(model), optimizer)
    train(run, optimizer, net)


# Right after the row above, which has compiled the same code: tracing then begins while updates are in flight, and
# AdamW rounds otherwise where it takes itself for traced.
@row(steps=4, ways=WAYS, optimizer="adamw")
def attached_then_compiled(run: Run) -> None:
    _, optimizer, net = plain(run, small)
    train(run, optimizer, _compiled(net))


@row(steps=4, ways=WAYS)
def attached_then_compiled_with_autograd_traced(run: Run) -> None:
    _, optimizer, net = plain(run, small)
    train(run, optimizer, torch.compile(net, backend="aot_eager"))


@row(steps=4, ways=WAYS)
def compiled_in_place(run: Run) -> None:
    model, optimizer, net = plain(run, small)
    model.compile(backend="eager")
    train(run, optimizer, net)


@row(steps=4, ways=WAYS)
def part_of_the_model_compiled(run: Run) -> None:
    model = nn.Sequential(_compiled(small()), nn.Linear(10, 10))
    optimizer = run.optimizer(model.parameters())
    train(run, optimizer, run.attach(model, optimizer))


@row(steps=4, ways=WAYS, ddp=False)
def function_compiled_around_the_model(run: Run) -> None:
    _, optimizer, net = plain(run, small)

    @_compiled
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(net(x), y)

    for step in range(run.steps):
        run.noted(loss_of(*run.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(steps=4, ways=WAYS)
def function_compiled_over_parameters(run: Run) -> None:
    """A compiled function gets parameters as arguments after the step."""
    model, optimizer, net = plain(run, small)

    @_compiled
    def norm(a: Tensor, b: Tensor) -> Tensor:
        return a.square().sum() + b.square().sum()

    train(run, optimizer, net, after=lambda _step: run.read(norm(model[0].weight, model[2].weight)))


@row(steps=4, ways=WAYS)
def loss_function_compiled(run: Run) -> None:
    _, optimizer, net = plain(run)
    loss_of = _compiled(lambda out, y: (out - y).square().mean())
    for step in range(run.steps):
        x, y = run.batch(step)
        run.noted(loss_of(net(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


@scripted
def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """Megatron's fused bias and GELU."""
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class BiasGelu(torch.autograd.Function):
    """Megatron's function with a scripted forward and backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(y, bias)
        out: Tensor = bias_gelu(bias, y)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, bias = ctx.saved_tensors
        with torch.enable_grad():
            x = (y + bias).detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.gelu(x, approximate="tanh"), x, grad)
        return slope, slope.sum(0)


def _raw(run: Run, read: Callable[[Raw, Tensor], Tensor]) -> None:
    _, optimizer, net = plain(run, lambda: Raw(read))
    train(run, optimizer, net)


# TorchScript optimizes a function after its first calls, which then rounds differently.
@row(rounds=ALL)
def scripted_bias_gelu(run: Run) -> None:
    """The parameter goes straight into a scripted function."""
    _raw(run, lambda m, x: bias_gelu(m.bias, x @ m.first))


@row(rounds=ALL)
def autograd_function_with_scripted_code(run: Run) -> None:
    _raw(run, lambda m, x: BiasGelu.apply(x @ m.first, m.bias))


@row(rounds=ALL)
def traced_function_over_parameters(run: Run) -> None:
    traced = scripted(lambda x, w, b: (x @ w + b).relu(), (torch.ones(8, 32), torch.ones(32, 34), torch.ones(34)))
    _raw(run, lambda m, x: traced(x, m.first, m.bias))


@row(rounds=ALL)
def scripted_model(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: scripted(small()))
    train(run, optimizer, net)


@row(rounds=ALL)
def scripted_part_of_a_model(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: nn.Sequential(scripted(small()), nn.Linear(10, 10)))
    train(run, optimizer, net)


@row(rounds=ALL)
def traced_model(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: scripted(small(), torch.ones(8, 32)))
    train(run, optimizer, net)


@row(rounds=ALL)
def scripted_while_attached(run: Run) -> None:
    """`torch.jit.script(model)` for export, right after a step."""
    model, optimizer, net = plain(run, small)

    def export(step: int) -> None:
        if step % 2:
            run.read(scripted(model)(run.batch(step, 3)[0]))

    train(run, optimizer, net, after=export)


class Checkpointed(nn.Module):
    """Every layer's activations are computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = mlp(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@row(core=True)
def activation_checkpointing(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: Checkpointed(reentrant=False))
    train(run, optimizer, net)


@row()
def activation_checkpointing_reentrant(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: Checkpointed(reentrant=True))

    def call(x: Tensor) -> Tensor:
        out: Tensor = net(x.requires_grad_())
        return out

    train(run, optimizer, call)


@row()
def checkpointed_sequential(run: Run) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
            return out

    _, optimizer, net = plain(run, Parts)
    train(run, optimizer, net)


@row(optimizer="adamw")
def saved_tensors_packed_by_hooks(run: Run) -> None:
    """Activations are kept in another precision for the backward pass."""
    _, optimizer, net = plain(run)

    def call(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            out: Tensor = net(x)
            return out

    train(run, optimizer, call)


@row()
def custom_autograd_function(run: Run) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    _raw(run, lambda m, x: Scale.apply(x, m.first) + m.bias)
