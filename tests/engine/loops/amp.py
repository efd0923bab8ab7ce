"""Loops in mixed precision: autocast, GradScaler, skipped steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from loops.models import convnet, mlp
from loops.table import plain, row, train
from loops.ways import DEVICE, Run


def _scaled(run: Run, *, clip: bool, fused: bool = False) -> None:
    model = mlp()
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True) if fused else run.optimizer(model.parameters())
    )
    net = run.attach(model, optimizer)
    scaler = torch.amp.GradScaler(DEVICE[0], init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(run.steps):
        loss = run.loss(net, step)
        if step == 3 and run.rank == run.world - 1:
            loss = loss * float("inf")
        before = model[0].weight.detach().clone()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            run.read(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(before, model[0].weight) == (step == 3), f"step {step} was wrongly skipped or taken"
        optimizer.zero_grad()
    assert scales[3] < scales[2], "no step was skipped"
    run.read(torch.tensor(scales))


@row(core=True, steps=6)
def grad_scaler_with_a_skipped_step(run: Run) -> None:
    _scaled(run, clip=False)


@row(optimizer="adamw", steps=6)
def grad_scaler_with_adamw(run: Run) -> None:
    _scaled(run, clip=False)


@row(optimizer="adamw_fused", steps=6)
def grad_scaler_with_a_fused_optimizer(run: Run) -> None:
    _scaled(run, clip=False, fused=True)


@row(optimizer="adamw", steps=6)
def grad_scaler_and_clipping(run: Run) -> None:
    _scaled(run, clip=True)


@row(steps=6)
def grad_scaler_with_two_optimizers(run: Run) -> None:
    model = mlp()
    low, high = run.optimizer(model[:3].parameters()), run.optimizer(model[3:].parameters())
    net = run.attach(model, low, high)
    scaler = torch.amp.GradScaler(DEVICE[0], init_scale=2.0**8, growth_interval=2)
    for step in range(run.steps):
        loss = run.loss(net, step)
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        scaler.step(low)
        scaler.step(high)
        scaler.update()
        model.zero_grad()
    run.read(torch.tensor(scaler.get_scale()))


@row(steps=6)
def grad_scaler_with_accumulation(run: Run) -> None:
    model, optimizer, net = plain(run)
    scaler = torch.amp.GradScaler(DEVICE[0], init_scale=2.0**8, growth_interval=2)
    for step in range(run.steps):
        with run.no_sync(model):
            scaler.scale(run.loss(net, step) / 2).backward()
        scaler.scale(run.loss(net, step, 1) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _cast(net: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE[0], dtype=dtype):
            out: Tensor = net(x)
            return out

    return call


@row()
def autocast_to_bf16(run: Run) -> None:
    _, optimizer, net = plain(run)
    train(run, optimizer, _cast(net, torch.bfloat16))


@row(optimizer="adamw")
def autocast_of_a_convnet(run: Run) -> None:
    _, optimizer, net = plain(run, convnet)
    train(run, optimizer, _cast(net, torch.bfloat16), shape=(6, 3, 8, 8))


@row()
def autocast_of_a_part(run: Run) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(32, 34), nn.Linear(34, 10)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(DEVICE[0], dtype=torch.bfloat16):
                h = self.low(x)
            out: Tensor = self.high(h.float())
            return out

    _, optimizer, net = plain(run, Part)
    train(run, optimizer, net)


@row()
def autocast_with_its_weight_cache(run: Run) -> None:
    """Inside one autocast region, a weight that was cast once is not cast again: two forwards and a step in it."""
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        with torch.autocast(DEVICE[0], dtype=torch.bfloat16):
            loss = run.loss(net, step) + run.loss(net, step, 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), torch.autocast(DEVICE[0], dtype=torch.bfloat16):
            run.read(model(run.batch(step, 2)[0]))


@row(optimizer="own")
def master_weights_by_hand(run: Run) -> None:
    """BF16 parameters train; float32 copies are stepped and copied back."""
    model = mlp().bfloat16()
    net = run.attach(model)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9)
    for step in range(run.steps):
        run.loss(lambda x: net(x.bfloat16()), step).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    run.read(*masters)
