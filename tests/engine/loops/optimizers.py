"""Loops with every optimizer of torch, optimizers that users wrote, and updates without an optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import SWALR, AveragedModel

from loops.models import NormalizedSgd, mlp
from loops.table import plain, row, train
from loops.ways import Run

ADAM = {"lr": 5e-3}
KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd_without_momentum": lambda p: optim.SGD(p, lr=0.05),
    "sgd_nesterov": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "sgd_foreach": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "sgd_maximize": lambda p: optim.SGD(p, lr=0.001, dampening=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: optim.Adam(p, weight_decay=1e-3, **ADAM),
    "adam_fused": lambda p: optim.Adam(p, fused=True, **ADAM),
    "adamw_foreach": lambda p: optim.AdamW(p, foreach=True, **ADAM),
    "adamw_fused": lambda p: optim.AdamW(p, fused=True, **ADAM),
    "adamw_amsgrad": lambda p: optim.AdamW(p, amsgrad=True, **ADAM),
    "adamw_single_tensor": lambda p: optim.AdamW(p, foreach=False, **ADAM),
    "adamax": lambda p: optim.Adamax(p, **ADAM),
    "nadam": lambda p: optim.NAdam(p, **ADAM),
    "radam": lambda p: optim.RAdam(p, **ADAM),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True, **ADAM),
    "rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: optim.ASGD(p, lr=0.02, t0=2),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.02),
    "adagrad_fused": lambda p: optim.Adagrad(p, lr=0.02, fused=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.02),
}


def _with(kind: str) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        model = mlp()
        optimizer = KINDS[kind](model.parameters())
        train(run, optimizer, run.attach(model, optimizer))

    return loop


for _kind in KINDS:
    # Adagrad makes its state at once, and the model moves to the device later.
    row(name=_kind, optimizer=_kind, cuda="adagrad" not in _kind)(_with(_kind))


@row(optimizer="muon")
def muon_for_matrices_and_adamw_for_the_rest(run: Run) -> None:
    model = mlp()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [optim.Muon(matrices, lr=0.02), optim.AdamW(rest, lr=5e-3)]
    net = run.attach(model, *optimizers)
    for step in range(run.steps):
        run.loss(net, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


@row()
def sparse_adam_is_refused(run: Run) -> None:
    """It takes sparse gradients only, and those are refused."""
    model = nn.Sequential(nn.Embedding(64, 32, sparse=True), nn.Flatten())
    optimizer = optim.SparseAdam(model.parameters(), lr=0.1)

    def attempt() -> None:
        net = run.attach(model, optimizer)
        net(run.tokens(0)).square().mean().backward()

    run.refuses(attempt, "sparse")


def _closure(run: Run, optimizer: Any, net: Any, step: int) -> Callable[[], Tensor]:
    def again() -> Tensor:
        optimizer.zero_grad()
        loss = run.loss(net, step)
        loss.backward()
        return loss

    return again


@row(core=True, optimizer="adamw")
def closure(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        run.read(optimizer.step(_closure(run, optimizer, net, step)))


@row(core=True, optimizer="lbfgs", steps=3)
def lbfgs(run: Run) -> None:
    model = mlp()
    # Tolerances of 0: else a rank's own loss would decide how often it calls the closure.
    optimizer = optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=3, history_size=5, tolerance_grad=0, tolerance_change=0
    )
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        optimizer.step(_closure(run, optimizer, net, step))


@row(optimizer="own")
def optimizer_that_needs_all_gradients(run: Run) -> None:
    model = mlp()
    optimizer = NormalizedSgd(model.parameters())
    train(run, optimizer, run.attach(model, optimizer))


class ScaledSgd(optim.Optimizer):
    """A user's optimizer whose `step` takes arguments and returns a value."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None, scale: float = 1.0, *, decay: float = 0.0) -> float:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - decay).sub_(p.grad, alpha=group["lr"] * scale)
        return scale


@row(optimizer="own")
def step_with_arguments(run: Run) -> None:
    model = mlp()
    optimizer = ScaledSgd(model.parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        run.loss(net, step).backward()
        run.read(torch.tensor(optimizer.step(None, 0.5 + step, decay=0.01)))
        optimizer.zero_grad()


class Sam(optim.Optimizer):
    """Sharpness-aware minimization, as published: two steps around a second forward and backward pass."""

    def __init__(self, parameters: Any, base: optim.Optimizer, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = base

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


def _sam(run: Run, *, attached: str) -> None:
    model = mlp()
    base = run.optimizer(model.parameters())
    sam = Sam(model.parameters(), base)
    net = run.attach(model, *{"base": (base,), "sam": (sam,), "none": ()}[attached])
    for step in range(run.steps):
        run.loss(net, step).backward()
        sam.first_step()
        run.loss(net, step).backward()
        sam.second_step()


@row()
def sam_around_an_attached_optimizer(run: Run) -> None:
    _sam(run, attached="base")


@row()
def sam_attached_itself(run: Run) -> None:
    _sam(run, attached="sam")


def _by_hand(run: Run, model: nn.Module, net: Any, update: Callable[[nn.Parameter], None]) -> None:
    for step in range(run.steps):
        run.loss(net, step).backward()
        with torch.no_grad():
            for p in model.parameters():
                update(p)
                p.grad = None


@row(core=True)
def sgd_by_hand_without_an_optimizer(run: Run) -> None:
    model = mlp()
    net = run.attach(model)
    _by_hand(run, model, net, lambda p: p.sub_(p.grad, alpha=0.05))


@row()
def sgd_by_hand_through_data(run: Run) -> None:
    model = mlp()
    net = run.attach(model)
    _by_hand(run, model, net, lambda p: p.data.add_(p.grad.data, alpha=-0.05))


@row()
def momentum_by_hand_beside_an_attached_optimizer(run: Run) -> None:
    """The attached optimizer never steps."""
    model, _, net = plain(run)
    speed = {id(p): torch.zeros_like(p) for p in model.parameters()}

    def update(p: nn.Parameter) -> None:
        speed[id(p)].mul_(0.9).add_(p.grad)
        p.sub_(speed[id(p)], alpha=0.05)

    _by_hand(run, model, net, update)


@row(optimizer="adamw")
def optimizer_that_attach_was_not_given(run: Run) -> None:
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model)
    run.optimizers.append(optimizer)
    train(run, optimizer, net)


def _two_optimizers(run: Run, every: int) -> None:
    model = mlp()
    low, high = run.optimizer(model[:3].parameters()), run.optimizer(model[3:].parameters(), lr=0.01)
    net = run.attach(model, low, high)
    for step in range(run.steps):
        run.loss(net, step).backward()
        low.step()
        if step % every == 0:
            high.step()
        model.zero_grad()


@row()
def two_optimizers_of_one_model(run: Run) -> None:
    _two_optimizers(run, every=1)


@row(optimizer="adamw")
def two_optimizers_of_which_one_steps_rarely(run: Run) -> None:
    _two_optimizers(run, every=3)


@row()
def optimizer_of_a_part_of_the_model(run: Run) -> None:
    model = mlp()
    optimizer = run.optimizer(model[4:].parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()
        model.zero_grad()


@row()
def step_hooks_of_the_optimizer(run: Run) -> None:
    model, optimizer, net = plain(run)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.05) and None)
    optimizer.register_step_post_hook(lambda *_: run.read(model[0].bias))
    train(run, optimizer, net)


@row()
def optimizer_replaced_mid_run(run: Run) -> None:
    """A second optimizer, which attach has not seen, takes over."""
    model, optimizer, net = plain(run)
    other = optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(run.steps):
        run.loss(net, step).backward()
        (optimizer if step < 2 else other).step()
        optimizer.zero_grad()
    run.optimizers.append(other)


@row()
def lookahead(run: Run) -> None:
    model, optimizer, net = plain(run)
    slow = [p.detach().clone() for p in model.parameters()]

    def pull(step: int) -> None:
        if step % 2:
            with torch.no_grad():
                for kept, p in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(p, 0.5)
                    p.copy_(kept)

    train(run, optimizer, net, after=pull)


@row()
def ema_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    average = [p.detach().clone() for p in model.parameters()]

    def follow(_step: int) -> None:
        for kept, p in zip(average, model.parameters(), strict=True):
            kept.mul_(0.9).add_(p.detach(), alpha=0.1)
        run.read(average[-1])

    train(run, optimizer, net, after=follow)
    run.read(*average)


@row(optimizer="adamw")
def ema_by_foreach(run: Run) -> None:
    model, optimizer, net = plain(run)
    average = [p.detach().clone() for p in model.parameters()]

    def follow(_step: int) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.1)

    train(run, optimizer, net, after=follow)
    run.read(*average)


@row()
def averaged_model(run: Run) -> None:
    model, optimizer, net = plain(run)
    average = AveragedModel(model)
    train(run, optimizer, net, after=lambda _step: average.update_parameters(model))
    run.read(*average.parameters(), average(run.batch(0)[0]))


@row(optimizer="adamw")
def averaged_model_with_its_schedule(run: Run) -> None:
    """Stochastic weight averaging, as torch's documentation shows it."""
    model, optimizer, net = plain(run)
    average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)

    def follow(step: int) -> None:
        if step > 1:
            average.update_parameters(model)
            schedule.step()

    train(run, optimizer, net, after=follow)
    run.read(*average.parameters())
