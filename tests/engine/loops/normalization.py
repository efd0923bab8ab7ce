"""Loops of models with buffers: BatchNorm, InstanceNorm, counters, buffers that are replaced."""

import torch
from torch import Tensor, nn

from loops.models import convnet
from loops.table import plain, row, train
from loops.ways import Run

IMAGES = (6, 3, 8, 8)


@row(core=True, optimizer="adamw", tuned=True, steps=8)
def batchnorm_buffers(run: Run) -> None:
    _, optimizer, net = plain(run, convnet)
    train(run, optimizer, net, shape=IMAGES)


@row()
def batchnorm_with_cumulative_average(run: Run) -> None:
    def make() -> nn.Module:
        model = convnet()
        model[1].momentum = model[4].momentum = None
        return model

    _, optimizer, net = plain(run, make)
    train(run, optimizer, net, shape=IMAGES)


@row(core=True, cuda=False)  # there torch's DDP raises an error: its broadcast changes what backward needs
def batchnorm_forward_twice_before_backward(run: Run) -> None:
    _, optimizer, net = plain(run, convnet)
    for step in range(run.steps):
        loss = run.loss(net, step, shape=IMAGES) + run.loss(net, step, 1, shape=IMAGES)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@row()
def batchnorm_with_accumulation(run: Run) -> None:
    model, optimizer, net = plain(run, convnet)
    for step in range(run.steps):
        with run.no_sync(model):
            run.loss(net, step, shape=IMAGES).backward()
        run.loss(net, step, 1, shape=IMAGES).backward()
        optimizer.step()
        optimizer.zero_grad()


@row()
def batchnorm_in_eval_mode(run: Run) -> None:
    """Fine-tuning with frozen statistics."""
    model, optimizer, net = plain(run, convnet)
    model[1].eval(), model[4].eval()
    train(run, optimizer, net, shape=IMAGES)


@row()
def evaluation_with_batchnorm(run: Run) -> None:
    model, optimizer, net = plain(run, convnet)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.inference_mode():
            out = model(run.batch(step, 9, shape=IMAGES)[0])
        # Rank 0's alone: whether another rank evaluates with its own statistics or rank 0's is not DDP's promise.
        run.seen["reads"].append(out.clone()) if run.rank == 0 else None
        model.train()

    train(run, optimizer, net, after=evaluate, shape=IMAGES)


@row()
def instance_norm_with_running_statistics(run: Run) -> None:
    _, optimizer, net = plain(
        run,
        lambda: nn.Sequential(
            nn.Conv2d(3, 12, 3),
            nn.InstanceNorm2d(12, affine=True, track_running_stats=True),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12 * 36, 10),
        ),
    )
    train(run, optimizer, net, shape=IMAGES)


@row(optimizer="adamw")
def layer_norm_and_group_norm(run: Run) -> None:
    _, optimizer, net = plain(
        run,
        lambda: nn.Sequential(
            nn.Conv2d(3, 12, 3, bias=False),
            nn.GroupNorm(3, 12),
            nn.ReLU(),
            nn.Flatten(),
            nn.LayerNorm(12 * 36),
            nn.Linear(12 * 36, 10),
        ),
    )
    train(run, optimizer, net, shape=IMAGES)


@row()
def lazy_modules_after_their_first_forward(run: Run) -> None:
    model = nn.Sequential(nn.LazyLinear(34), nn.Tanh(), nn.LazyLinear(10))
    model(torch.zeros(1, 32))
    optimizer = run.optimizer(model.parameters())
    train(run, optimizer, run.attach(model, optimizer))


class Counting(nn.Module):
    """A counter in a buffer decides what the forward does; one buffer is replaced in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.randn(32))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        out: Tensor = self.last((x - self.mean) * (1 + 0.1 * (self.calls % 3)))
        return out


@row(core=True)
def counter_and_replaced_buffer(run: Run) -> None:
    _, optimizer, net = plain(run, Counting)
    train(run, optimizer, net)


@row()
def buffer_edited_by_the_user(run: Run) -> None:
    """On all ranks alike; the next forward reads the edited values."""
    model, optimizer, net = plain(run, Counting)
    for step in range(run.steps):
        with torch.no_grad():
            model.mean.add_(0.1 * step)
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
