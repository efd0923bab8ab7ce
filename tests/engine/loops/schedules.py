"""Loops with learning-rate schedules and settings that change while updates are in flight."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from loops.models import mlp
from loops.table import plain, row, train
from loops.ways import Run


def _scheduled(run: Run, make: Callable[[Any], Any], *, first: bool) -> None:
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    scheduler = make(optimizer) if first else None
    net = run.attach(model, optimizer)
    scheduler = scheduler or make(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        train(run, optimizer, net, after=lambda _step: scheduler.step())
    run.read(torch.tensor(scheduler.get_last_lr()))


@row(core=True)
def step_lr_built_before_attach(run: Run) -> None:
    _scheduled(run, lambda o: StepLR(o, 2, 0.5), first=True)


@row(optimizer="adamw")
def step_lr_built_after_attach(run: Run) -> None:
    _scheduled(run, lambda o: StepLR(o, 2, 0.5), first=False)


@row(optimizer="adamw")
def one_cycle_built_before_attach(run: Run) -> None:
    _scheduled(run, lambda o: OneCycleLR(o, 0.05, total_steps=run.steps + 1), first=True)


@row(core=True)
def one_cycle_built_after_attach(run: Run) -> None:
    _scheduled(run, lambda o: OneCycleLR(o, 0.05, total_steps=run.steps + 1), first=False)


@row()
def cosine_with_warm_restarts(run: Run) -> None:
    _scheduled(run, lambda o: CosineAnnealingWarmRestarts(o, 2), first=True)


@row()
def cyclic_lr_and_momentum(run: Run) -> None:
    _scheduled(run, lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True), first=False)


@row(optimizer="adamw")
def warmup_then_lambda(run: Run) -> None:
    def make(optimizer: Any) -> Any:
        parts = [LinearLR(optimizer, 0.1, total_iters=2), LambdaLR(optimizer, lambda n: 0.9**n)]
        return SequentialLR(optimizer, parts, milestones=[2])

    _scheduled(run, make, first=True)


@row()
def reduced_on_a_plateau(run: Run) -> None:
    _, optimizer, net = plain(run)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    train(run, optimizer, net, after=lambda step: scheduler.step(float(step // 2)))
    run.read(torch.tensor(optimizer.param_groups[0]["lr"]))


@row()
def learning_rate_set_by_hand(run: Run) -> None:
    _, optimizer, net = plain(run)

    def decay(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.param_groups[0]["weight_decay"] = 0.01 * (step % 2)

    train(run, optimizer, net, after=decay)


@row(optimizer="adamw")
def learning_rate_in_a_tensor(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(5e-3), foreach=False)
    net = run.attach(model, optimizer)
    train(run, optimizer, net, after=lambda _step: optimizer.param_groups[0]["lr"].mul_(0.5))


@row(core=True)
def parameter_groups(run: Run) -> None:
    model = mlp()
    biases = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": biases, "lr": 0.002, "weight_decay": 0.0},
        {"params": matrices[:2], "lr": 0.01},
        {"params": matrices[2:]},
    ]
    optimizer = run.optimizer(groups)
    train(run, optimizer, run.attach(model, optimizer))


@row(optimizer="adamw")
def parameter_group_added_mid_run(run: Run) -> None:
    model = mlp()
    optimizer = run.optimizer(model[:4].parameters())
    net = run.attach(model, optimizer)

    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()
        if step == 1:
            optimizer.add_param_group({"params": list(model[4:].parameters()), "lr": 0.01})
        model.zero_grad()


@row()
def parameter_removed_from_its_group(run: Run) -> None:
    model, optimizer, net = plain(run)

    def drop(step: int) -> None:
        if step == 1:
            optimizer.state.pop(optimizer.param_groups[0]["params"].pop())
        model[6].bias.grad = None

    train(run, optimizer, net, after=drop)
