"""`bench convergence`: accuracy and loss with each codec beside dense training, and the bytes that were sent.

Model, seed, samples and optimizer are the same for every codec. The ranks run in lockstep in this process: their
gradients are computed one after the other on one replica, which is exact, because all ranks have the same parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline import codecs
from syncline.bench.output import Countdown, environment
from syncline.stats import mean
from syncline.train.data.fashion_mnist import DEBIAN
from syncline.train.data.sampler import Sampler
from syncline.train.workload import Workload, build, load_optimizer

DENSE = "none"
# Codecs that need arguments.
CHOICES = {"warmup": "warmup(topk(0.01), steps=100)"}
# Codecs with their own momentum: the momentum of the optimizer would count it twice.
OPTIMIZERS = {"dgc": "sgd(lr=0.02)"}
_SMOOTH = 20


@dataclass(frozen=True)
class Options:
    """Options that are the same for all codecs."""

    model: str = "vgg11(width=0.125)"
    data: str = "auto"
    optimizer: str = "sgd(lr=0.02, momentum=0.9)"
    workers: int = 4
    batch: int = 64
    steps: int = 800
    seed: int = 0
    evaluate_every: int = 50
    test_samples: int = 2000
    final_samples: int = 10_000
    small: int = 16384
    """Tensors of at most this many values travel together, as one unit."""
    device: str = "cpu"


def specs() -> list[str]:
    """Every registered codec at its defaults, dense first."""
    return [DENSE, *(CHOICES.get(name, name) for name in codecs.available() if name != DENSE)]


def measure(
    options: Options, names: Sequence[str] | None = None, *, progress: Callable[[str], None] = print
) -> dict[str, Any]:
    """One row for each codec, compared with the dense row."""
    chosen = list(names) if names else specs()
    if DENSE not in chosen:
        chosen.insert(0, DENSE)
    data = options.data
    if data == "auto":
        data = "fashion-mnist" if DEBIAN.exists() else "shapes"
    rows = []
    steps = Countdown(len(chosen) * options.steps, progress)
    for number, spec in enumerate(chosen, 1):
        place = f"{spec} ({number} of {len(chosen)})"

        def step_done(step: int, loss: Tensor, place: str = place) -> None:
            steps.part_done(f"{place}: step {step} of {options.steps}, loss {loss:.4f}")

        rows.append(train(spec, options, data=data, step_done=step_done))
        progress(f"{spec}: accuracy {rows[-1]['accuracy']:.1%}, loss {rows[-1]['final_loss']:.4f}")
    _against_dense(rows, next(row for row in rows if row["codec"] == DENSE))
    return {
        "environment": environment(torch.device(options.device)),
        "setting": vars(options) | {"data": data},
        "rows": rows,
    }


def train(
    spec: str, options: Options, *, data: str, step_done: Callable[[int, Tensor], None] | None = None
) -> dict[str, Any]:
    """Train with one codec: the loss of each step, accuracies at intervals, bytes that a rank sends."""
    codec = codecs.build(spec)
    device = torch.device(options.device)
    workload = build(options.model, data, seed=options.seed).to(device)
    (phase,) = workload.phases
    named = [(name, p) for name, p in phase.module.named_parameters() if p.requires_grad]
    chosen = OPTIMIZERS.get(codec.definition.name, options.optimizer)
    optimizer = load_optimizer(chosen, [p for _, p in named])
    # The learning rate falls to zero, so that the final accuracy does not depend on the noise of the last steps.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
    names = [name for name, _ in named]
    where = {"batch": options.batch, "seed": options.seed, "workers": options.workers}
    samplers = [Sampler(len(workload.train), rank=rank, **where) for rank in range(options.workers)]
    states: list[dict[str, Tensor]] | None = None
    losses: list[Tensor] = []
    accuracies: list[tuple[int, float]] = []
    sent = 0
    for step in range(options.steps):
        gradients = []
        total = torch.zeros((), device=device)
        for sampler in samplers:
            number, indices = sampler(step)
            batch = _moved(workload.train.batch(indices, epoch=number), device)
            loss = phase.module(*batch)
            gradients.append(list(torch.autograd.grad(loss, [p for _, p in named])))
            total = total + loss.detach()
        result = codecs.lockstep(
            codec, gradients, names=names, states=states, first_step=step, seed=options.seed, small=options.small
        )
        states = result.states
        sent += result.wire_bytes[0]
        for (_, parameter), gradient in zip(named, result.outputs[0], strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
        losses.append(total / options.workers)
        if (step + 1) % options.evaluate_every == 0:
            accuracies.append((step + 1, _accuracy(workload, options.test_samples)))
        if step_done is not None:
            step_done(step + 1, losses[-1])
    final = _accuracy(workload, options.final_samples)
    curve: list[float] = torch.stack(losses).tolist()
    return {
        "codec": spec,
        "optimizer": chosen,
        "loss": curve,
        "accuracies": [*accuracies, (options.steps, final)],
        "accuracy": final,
        "final_loss": mean(curve[-_SMOOTH:]),
        "bytes_per_step": sent / options.steps,
    }


def _moved(batch: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)


@torch.no_grad()
def _accuracy(workload: Workload, samples: int) -> float:
    assert workload.test is not None
    assert workload.evaluate is not None
    device = next(workload.phases[0].module.parameters()).device
    correct, counted = 0.0, 0
    for indices in torch.arange(min(samples, len(workload.test))).split(250):
        right, number = workload.evaluate(_moved(workload.test.batch(indices), device))
        correct, counted = correct + right, counted + number
    return correct / counted


def _against_dense(rows: list[dict[str, Any]], dense: dict[str, Any]) -> None:
    """Add the points below dense, and the bytes until accuracy was first within a point of dense."""
    goal = dense["accuracy"] - 0.01
    for row in rows:
        row["points_below_dense"] = (dense["accuracy"] - row["accuracy"]) * 100
        step = next((step for step, accuracy in row["accuracies"] if accuracy >= goal), None)
        row["bytes_to_dense_accuracy"] = None if step is None else step * row["bytes_per_step"]
        row["wire_ratio"] = dense["bytes_per_step"] / row["bytes_per_step"]
        row["within_a_point"] = row["points_below_dense"] <= 1.0
