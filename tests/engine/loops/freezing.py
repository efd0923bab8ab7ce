"""Loops in which parameters are frozen, unfrozen, or not used in a step."""

from typing import Any

import torch
from torch import Tensor, nn

from loops.models import Branches, mlp
from loops.table import plain, row
from loops.ways import Run


def _branches(run: Run, *, set_to_none: bool) -> None:
    model = Branches(run.rank)
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, unused=True)
    for step in range(run.steps):
        run.loss(lambda x, step=step: net(x, step), step).backward()
        if step % 4 == 3:  # also without anybody looking
            missing = [p.grad is None for p in model.parameters()]
            run.read(torch.tensor(missing))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


@row(core=True, steps=6)
def unused_parameters(run: Run) -> None:
    _branches(run, set_to_none=True)


@row(optimizer="adamw", steps=6)
def unused_parameters_with_adamw(run: Run) -> None:
    _branches(run, set_to_none=True)


@row(steps=6)
def unused_parameters_with_zero_gradients(run: Run) -> None:
    _branches(run, set_to_none=False)


@row(core=True)
def parameters_that_no_rank_uses(run: Run) -> None:
    """They keep `grad` None under every codec, so that weight decay does not touch them."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.never = mlp(), nn.Linear(32, 34)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    model = Unused()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, unused=True)
    for step in range(run.steps):
        run.loss(net, step).backward()
        run.read(torch.tensor([p.grad is None for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()


# A stack of matrices is rounded differently from single ones, and unused parameters are in the engine's stacks.
@row(rounds=("powersgd",))
def branch_that_depends_on_the_step(run: Run) -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 10) for name in ("a", "b", "c")})
    optimizer = run.optimizer(model.parameters())

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor, name: str) -> Tensor:
            out: Tensor = self.layers[name](x)
            return out

    net = run.attach(Chosen(), optimizer, unused=True)
    for step in range(run.steps):
        run.loss(lambda x, step=step: net(x, "abc"[step % 3]), step).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(core=True, rounds=("powersgd",))
def experts_chosen_by_each_rank(run: Run) -> None:
    """A mixture of experts: ranks use different ones, some are used by nobody."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList([nn.Linear(32, 10) for _ in range(4)])

        def forward(self, x: Tensor, chosen: int) -> Tensor:
            out: Tensor = self.experts[chosen](x) * self.gate(x).softmax(-1)[:, chosen : chosen + 1]
            return out

    model = Experts()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, unused=True)
    for step in range(run.steps):
        run.loss(lambda x, step=step: net(x, (step + run.rank) % 3), step).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(rounds=("powersgd",))
def layers_dropped_at_random(run: Run) -> None:
    """Stochastic depth, drawn by each rank."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.last = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)]), nn.Linear(32, 10)

        def forward(self, x: Tensor, kept: list[bool]) -> Tensor:
            for layer, keep in zip(self.layers, kept, strict=True):
                x = x + layer(x).tanh() if keep else x
            out: Tensor = self.last(x)
            return out

    model = Deep()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, unused=True)
    for step in range(run.steps):
        generator = torch.Generator().manual_seed(step * 10 + run.rank)
        kept = (torch.rand(3, generator=generator) > 0.4).tolist()
        run.loss(lambda x, kept=kept: net(x, kept), step).backward()
        optimizer.step()
        optimizer.zero_grad()


def _frozen(run: Run, *, at: int | None, until: int) -> None:
    model = mlp()
    model[2].requires_grad_(at is not None)
    optimizer = run.optimizer(model.parameters())
    net: Any = run.attach(model, optimizer)
    for step in range(run.steps):
        if step in (at, until):
            net = None
            model[2].requires_grad_(step == until)
            net = run.way.again(model)
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(core=True)
def frozen_mid_run_and_unfrozen(run: Run) -> None:
    _frozen(run, at=1, until=3)


@row(optimizer="adamw")
def frozen_at_attach_and_unfrozen(run: Run) -> None:
    _frozen(run, at=None, until=2)


@row()
def unfrozen_layer_by_layer(run: Run) -> None:
    model = mlp()
    model[:6].requires_grad_(False)
    optimizer = run.optimizer(model.parameters())
    net: Any = run.attach(model, optimizer)
    for step in range(run.steps):
        if step in (1, 2, 3):
            net = None
            model[2 * (3 - step)].requires_grad_(True)
            net = run.way.again(model)
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(optimizer="adamw")
def head_alone_is_trained(run: Run) -> None:
    model = mlp()
    model[:6].requires_grad_(False)
    optimizer = run.optimizer(model[6].parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@row()
def low_rank_adapters(run: Run) -> None:
    """LoRA: frozen layers with trained factors beside them."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(32, 34).requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(4, 32) * 0.1), nn.Parameter(torch.zeros(34, 4))
            self.last = nn.Linear(34, 10).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.base(x) + x @ self.down.t() @ self.up.t())
            return out

    model = Adapted()
    optimizer = run.optimizer([p for p in model.parameters() if p.requires_grad])
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(ddp=False)
def frozen_within_a_step(run: Run) -> None:
    """A part is frozen for a second loss in the same step."""
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        with run.no_sync(model):
            run.loss(net, step).backward()
        run.loss(net, step, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(False)
        with torch.no_grad():
            run.loss(model, step, 2)
        model[0].requires_grad_(True)
