"""Train a job with a fixed codec, its ranks in lockstep in this process: exact, deterministic, and without a network.

The gradients of the ranks are computed one after the other on one replica, because all ranks have the same parameters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncline import codecs
from syncline.bench.quality.tasks import Job
from syncline.bench.quality.training import Parts, evaluate, on_device, prepare, row
from syncline.train.data.sampler import Sampler
from syncline.train.workload import Phase

_SMALL = 16384
"""Tensors of at most this many values travel together, as one unit."""


def train(job: Job, step_done: Callable[[int], None]) -> dict[str, Any]:
    """Train, and return the row; `step_done(steps)` is called after each step."""
    device = torch.device(job.device)
    parts = prepare(job, device)
    codec = codecs.build(job.codec)
    samplers = [
        Sampler(len(parts.workload.train), batch=job.batch, seed=job.seed, rank=rank, workers=job.workers)
        for rank in range(job.workers)
    ]
    phases = parts.workload.phases
    states: dict[str, list[dict[str, Tensor]]] = {}
    losses: dict[str, list[Tensor]] = {phase.name: [] for phase in phases}
    sent = 0
    for step in range(job.steps):
        batches = [_batch(parts, sampler, step, device) for sampler in samplers]
        for phase, optimizer, schedule in zip(phases, parts.optimizers, parts.schedules, strict=True):
            loss, result = _averaged(phase, codec, batches, states.get(phase.name), step=step, seed=job.seed)
            states[phase.name] = result.states
            sent += result.wire_bytes[0]
            trained = (p for p in phase.module.parameters() if p.requires_grad)
            for parameter, gradient in zip(trained, result.outputs[0], strict=True):
                parameter.grad = gradient
            optimizer.step()
            schedule.step()
            losses[phase.name].append(loss)
        step_done(step + 1)
    curves = {name: torch.stack(curve).tolist() for name, curve in losses.items()}
    return row(job, curves, score=evaluate(parts.workload, device), bytes_per_step=sent / job.steps)


def _averaged(
    phase: Phase, codec: codecs.Codec, batches: list[tuple[Tensor, ...]], states: list[dict[str, Tensor]] | None, *,
    step: int, seed: int,
) -> tuple[Tensor, codecs.Lockstep]:  # fmt: skip
    """The mean loss of the ranks' batches, and their gradients after the codec."""
    named = [(name, p) for name, p in phase.module.named_parameters() if p.requires_grad]
    gradients, losses = [], []
    for batch in batches:
        loss = phase.module(*batch)
        found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        gradients.append([torch.zeros_like(p) if g is None else g for (_, p), g in zip(named, found, strict=True)])
        losses.append(loss.detach())
    names = [name for name, _ in named]
    result = codecs.lockstep(codec, gradients, names=names, states=states, first_step=step, seed=seed, small=_SMALL)
    return torch.stack(losses).mean(), result


def _batch(parts: Parts, sampler: Sampler, step: int, device: torch.device) -> tuple[Tensor, ...]:
    epoch, indices = sampler(step)
    return on_device(parts.workload.train.batch(indices, epoch=epoch), device)
