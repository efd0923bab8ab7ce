"""Loops with derivatives of derivatives and functional calls: MAML, penalties, `torch.func`, ensembles."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, stack_module_state, vjp, vmap

from loops.models import mlp
from loops.table import plain, row, train
from loops.ways import DEVICE, Run


@row()
def functional_call_with_named_parameters(run: Run) -> None:
    _, optimizer, net = plain(run)
    train(run, optimizer, lambda x: functional_call(net, dict(net.named_parameters()), (x,)))


@row(core=True, ddp=False)
def maml(run: Run) -> None:
    """Two inner steps on parameters of a graph, and a backward pass through them."""
    model, optimizer, _ = plain(run)
    for step in range(run.steps):
        fast = dict(model.named_parameters())
        for inner in range(2):
            x, y = run.batch(step, inner)
            slopes = torch.autograd.grad(
                F.mse_loss(functional_call(model, fast, (x,)), y), list(fast.values()), create_graph=True
            )
            fast = {name: p - 0.05 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
        x, y = run.batch(step, 7)
        run.noted(F.mse_loss(functional_call(model, fast, (x,)), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(ddp=False, optimizer="adamw")
def maml_of_first_order(run: Run) -> None:
    model, optimizer, _ = plain(run)
    for step in range(run.steps):
        x, y = run.batch(step)
        fast = dict(model.named_parameters())
        slopes = torch.autograd.grad(F.mse_loss(functional_call(model, fast, (x,)), y), list(fast.values()))
        fast = {name: p - 0.05 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
        run.loss(lambda x, fast=fast: functional_call(model, fast, (x,)), step, 3).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(ddp=False)
def reptile(run: Run) -> None:
    """Inner steps on a copy; the difference is the gradient, set by hand and averaged by hand."""
    import copy

    import torch.distributed as dist

    model, optimizer, _ = plain(run)
    for step in range(run.steps):
        twin = copy.deepcopy(model)
        inner = torch.optim.SGD(twin.parameters(), lr=0.05)
        for micro in range(2):
            run.loss(twin, step, micro).backward()
            inner.step()
            inner.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = (p.detach() - q.detach()) / run.world
            dist.all_reduce(p.grad, group=run.way.group)
        optimizer.step()
        optimizer.zero_grad()


@row(ddp=False)
def penalty_on_the_gradient_of_the_input(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        x, y = run.batch(step)
        x.requires_grad_()
        loss = F.mse_loss(net(x).tanh(), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        run.noted(loss + slope.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.read(*model.parameters())


@row(ddp=False)
def penalty_on_the_gradient_of_parameters(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        loss = run.loss(net, step)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        run.noted(loss + 0.1 * sum(g.square().sum() for g in slopes)).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(ddp=False)
def hessian_vector_product_after_the_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def curvature(step: int) -> None:
        x, y = run.batch(step, 3)
        parameters = list(model.parameters())
        slopes = torch.autograd.grad(F.mse_loss(model(x).tanh(), y), parameters, create_graph=True)
        dot = sum((g * p.detach()).sum() for g, p in zip(slopes, parameters, strict=True))
        run.read(*torch.autograd.grad(dot, parameters))

    train(run, optimizer, net, after=curvature)


def _functional(run: Run, read: str) -> None:
    """`torch.func` over the raw parameters, right after a step."""
    model, optimizer, net = plain(run)

    def look(step: int) -> None:
        x, y = run.batch(step, 3)
        names = dict(model.named_parameters())

        def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(functional_call(model, parameters, (x,)), y)

        if read == "grad":
            found = grad(loss_of)(names, x, y)
        elif read == "grad_and_value":
            found, value = grad_and_value(loss_of)(names, x, y)
            run.read(value)
        elif read == "vjp":
            found = vjp(lambda p: loss_of(p, x, y), names)[1](torch.tensor(1.0, device=x.device))[0]
        elif read == "jvp":
            ones = {name: torch.ones_like(p) for name, p in names.items()}
            run.read(jvp(lambda p: loss_of(p, x, y), (names,), (ones,))[1])
            found = {}
        else:
            found = vmap(grad(loss_of), in_dims=(None, 0, 0))(names, x[:, None], y[:, None])
        run.read(*found.values())

    train(run, optimizer, net, after=look)


@row()
def functional_grad_after_the_step(run: Run) -> None:
    _functional(run, "grad")


@row()
def functional_grad_and_value_after_the_step(run: Run) -> None:
    _functional(run, "grad_and_value")


@row()
def functional_vjp_after_the_step(run: Run) -> None:
    _functional(run, "vjp")


@row()
def functional_jvp_after_the_step(run: Run) -> None:
    _functional(run, "jvp")


@row()
def gradients_of_each_sample(run: Run) -> None:
    _functional(run, "vmap")


@row()
def jacobian_and_hessian_of_one_layer(run: Run) -> None:
    model, optimizer, net = plain(run)

    def look(step: int) -> None:
        x = run.batch(step, 3)[0][:2]
        run.read(jacrev(lambda w: (x @ w.t()).tanh())(model[0].weight)[:, :2, :1])
        run.read(hessian(lambda b: (b * b * b).sum())(model[6].bias))

    train(run, optimizer, net, after=look)


@row(ddp=False)
def gradients_by_torch_func_set_by_hand(run: Run) -> None:
    """`torch.func.grad` exchanges nothing: the user averages and sets `p.grad`."""
    import torch.distributed as dist

    model, optimizer, _ = plain(run)
    for step in range(run.steps):
        x, y = run.batch(step)
        named = dict(model.named_parameters())
        slopes = grad(lambda p, x=x, y=y: F.mse_loss(functional_call(model, p, (x,)), y))(named)
        for name, p in named.items():
            p.grad = slopes[name] / run.world
            dist.all_reduce(p.grad, group=run.way.group)
        optimizer.step()
        optimizer.zero_grad()


class Ensemble(nn.Module):
    """Three models of one shape whose stacked parameters are called by `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        stacked, _ = stack_module_state([nn.Linear(32, 10) for _ in range(3)])
        self.weight, self.bias = (nn.Parameter(stacked[name].detach()) for name in ("weight", "bias"))
        self.base = [nn.Linear(32, 10, device="meta")]

    def forward(self, x: Tensor) -> Tensor:
        stacked = {"weight": self.weight, "bias": self.bias}
        each = vmap(lambda p: functional_call(self.base[0], p, (x,)))(stacked)
        return each.mean(0)


@row()
def ensemble_by_vmap(run: Run) -> None:
    _, optimizer, net = plain(run, Ensemble)
    train(run, optimizer, net)


@row()
def ensemble_stacked_after_the_step(run: Run) -> None:
    """`stack_module_state` reads the parameters of several attached models."""
    models = [mlp(), mlp()]
    optimizers = [run.optimizer(m.parameters()) for m in models]
    nets = [run.attach(m, o) for m, o in zip(models, optimizers, strict=True)]
    base = mlp().to(DEVICE[0])
    for step in range(run.steps):
        for net, optimizer in zip(nets, optimizers, strict=True):
            run.loss(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters, _ = stack_module_state(models)
        x = run.batch(step, 3)[0]
        run.read(vmap(lambda p, x=x: functional_call(base, p, (x,)))(parameters))


@row()
def forward_mode_derivative_after_the_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def look(step: int) -> None:
        x = run.batch(step, 3)[0]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            run.read(torch.autograd.forward_ad.unpack_dual(model(dual)).tangent)

    train(run, optimizer, net, after=look)
