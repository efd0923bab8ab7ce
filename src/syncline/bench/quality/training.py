"""Parts of a job of `bench quality`, its first weights, its evaluation and its row; lockstep and ranks share them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from syncline.bench.quality.tasks import Job
from syncline.stats import mean
from syncline.train.data.sampler import Sampler
from syncline.train.workload import Workload, build, load_optimizer

TEST_SAMPLES, LOSS_SAMPLES = 10_000, 2_000
"""The most test samples whose accuracy and whose loss are measured."""
_TEST_BATCH = 250
_LAST = 20
"""Steps at the end whose mean is the final training loss."""
_POINTS = 60
"""The most points of a loss curve in the file."""
_DIGITS = 5


@dataclass(frozen=True)
class Parts:
    """A job's workload, and for each of its phases the optimizer and the learning rate's schedule."""

    workload: Workload
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedules: tuple[LambdaLR, ...]


def prepare(job: Job, device: torch.device, *, rank: int = 0) -> Parts:
    """Model, data and optimizers of a job, the same on every rank; random numbers from now on are the rank's own.

    The learning rate falls to zero, so that the final figures do not depend on the noise of the last steps.
    """
    workload = build(job.model, job.data, seed=job.seed).to(device)
    if job.pretrain_steps:
        _load(workload, pretrained(job.pretrain, job.data, job.pretrain_steps, job.batch, job.seed, device))
    parameters = [[p for p in phase.module.parameters() if p.requires_grad] for phase in workload.phases]
    optimizers = tuple(load_optimizer(job.optimizer, one) for one in parameters)
    torch.manual_seed(1000 * job.seed + rank)  # dropout
    return Parts(workload, optimizers, tuple(LambdaLR(one, lambda step: 1 - step / job.steps) for one in optimizers))


@lru_cache(maxsize=4)
def pretrained(
    model: str, data: str, steps: int, batch: int, seed: int, device: torch.device
) -> Mapping[str, Tensor]:  # fmt: skip
    """The weights of a model after some dense steps on one rank."""
    workload = build(model, data, seed=seed).to(device)
    (phase,) = workload.phases
    optimizer = load_optimizer(phase.optimizer, phase.module.parameters())
    sampler = Sampler(len(workload.train), batch=batch, seed=seed)
    for step in range(steps):
        epoch, indices = sampler(step)
        optimizer.zero_grad()
        phase.module(*on_device(workload.train.batch(indices, epoch=epoch), device)).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in phase.module.state_dict().items()}


def on_device(batch: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """A batch on the device that trains."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)


@torch.no_grad()
def evaluate(workload: Workload, device: torch.device) -> tuple[float | None, float | None]:
    """Accuracy and mean loss on the test samples; None where a task has none."""
    if workload.test is None:
        return None, None
    (phase,) = workload.phases
    right, answers, loss, samples = 0.0, 0, 0.0, 0
    phase.module.eval()
    for indices in torch.arange(min(TEST_SAMPLES, len(workload.test))).split(_TEST_BATCH):
        batch = on_device(workload.test.batch(indices), device)
        if samples < LOSS_SAMPLES:
            loss, samples = loss + len(indices) * float(phase.module(*batch)), samples + len(indices)
        if workload.evaluate is not None:
            more, count = workload.evaluate(batch)
            right, answers = right + more, answers + count
    phase.module.train()
    return right / answers if answers else None, loss / samples


def row(
    job: Job, losses: Mapping[str, Sequence[float]], *, score: tuple[float | None, float | None],
    seconds: Sequence[float] = (), chosen: Mapping[str, float] | None = None, errors: Mapping[str, float] | None = None,
    changes: Sequence[str] = (), bytes_per_step: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A row of the result: the job, the loss curve of each phase as means of `window` steps, and the final figures.

    `seconds`: the time at the end of each step; `chosen`: the codecs of the last plan, with their share of the values;
    `errors`: what they lost, as far as it was read; `changes`: codecs that the guard changed, and why.
    """
    window = -(-job.steps // _POINTS)
    accuracy, test_loss = score
    return asdict(job) | {
        "window": window,
        "loss": {phase: _means(curve, window) for phase, curve in losses.items()},
        "final_loss": {phase: _short(mean(curve[-_LAST:])) for phase, curve in losses.items()},
        "accuracy": accuracy,
        "test_loss": None if test_loss is None else _short(test_loss),
        "bytes_per_step": bytes_per_step,
        "seconds": [_short(seconds[min(end, job.steps) - 1]) for end in range(window, job.steps + window, window)]
        if seconds
        else [],
        "chosen": dict(chosen or {}),
        "errors": {name: _short(value) for name, value in (errors or {}).items()},
        "changes": list(changes),
    }


def _means(curve: Sequence[float], window: int) -> list[float]:
    return [_short(mean(curve[start : start + window])) for start in range(0, len(curve), window)]


def _short(value: float) -> float:
    """A figure with the digits that mean something."""
    return float(f"{value:.{_DIGITS}g}")


def _load(workload: Workload, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights whose names and shapes the model has, too."""
    (phase,) = workload.phases
    own = phase.module.state_dict()
    fitting = {name: tensor for name, tensor in weights.items() if name in own and own[name].shape == tensor.shape}
    assert fitting, "the pretrained model has nothing in common with the model"
    phase.module.load_state_dict({**own, **fitting})
