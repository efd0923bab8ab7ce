"""Pretrained weights for the fine-tuning of `bench pipeline`: one process, other classes, a file of plain tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.bench.pipeline.options import Options
from syncline.files import writing
from syncline.train.data.sampler import Sampler
from syncline.train.workload import Workload, build, load_optimizer

_EVALUATED, _TESTED = 500, 2000


def pretrain(options: Options, path: Path, *, seed: int = 1000, progress: Callable[[str], None]) -> float:
    """Train the model on the pretraining data and save its weights; returns the test accuracy there."""
    workload = build(options.pretrain_model or options.model, options.pretrain, seed=seed).to(options.device)
    (phase,) = workload.phases
    sampler = Sampler(len(workload.train), batch=options.batch, seed=seed)
    optimizer = load_optimizer(options.optimizer, phase.module.parameters())
    total = options.pretrain_epochs * sampler.batches
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: one_cycle(step, total))
    for step in range(total):
        epoch, indices = sampler(step)
        batch = [part.to(options.device) for part in workload.train.batch(indices, epoch=epoch)]
        with arithmetic(options):
            loss = phase.module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % sampler.batches == 0:
            progress(f"pretraining, epoch {epoch + 1} of {options.pretrain_epochs}: loss {loss:.3f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        torch.save({name: tensor.cpu() for name, tensor in phase.module.state_dict().items()}, path)
    return _accuracy(workload, options)


def arithmetic(options: Options) -> AbstractContextManager[Any]:
    """BF16 arithmetic if the options ask for it."""
    return torch.autocast(options.device, torch.bfloat16) if options.autocast else nullcontext()


def _accuracy(workload: Workload, options: Options) -> float:
    assert workload.test is not None
    assert workload.evaluate is not None
    right, counted = 0.0, 0
    for indices in torch.arange(min(_TESTED, len(workload.test))).split(_EVALUATED):
        batch = tuple(part.to(options.device) for part in workload.test.batch(indices))
        with arithmetic(options):
            more, count = workload.evaluate(batch)
        right, counted = right + more, counted + count
    return right / counted


def load_pretrained(module: nn.Module, path: Path) -> int:
    """Copy all tensors of the file that fit (not the output layer of other classes); returns their number."""
    saved = torch.load(path, weights_only=True, map_location="cpu")
    own = module.state_dict()
    fitting = {name: tensor for name, tensor in saved.items() if name in own and own[name].shape == tensor.shape}
    module.load_state_dict({**own, **fitting})
    return len(fitting)


def one_cycle(step: int, total: int) -> float:
    """Learning rate factor: up over the first tenth of the steps, then down to zero.

    >>> [round(one_cycle(step, 20), 2) for step in (0, 1, 11, 19)]
    [0.5, 1.0, 0.5, 0.06]
    """
    rise = max(1, total // 10)
    return min((step + 1) / rise, max(0.0, (total - step) / (total - rise)))
