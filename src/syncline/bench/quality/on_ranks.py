"""Train a job on real ranks that are attached to the engine, over links of a given bandwidth: loss over seconds.

`auto` needs this, because it chooses codecs by the network that it finds.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.bench.quality.tasks import DENSE, Job
from syncline.bench.quality.training import evaluate, on_device, prepare, row
from syncline.bench.ranks import places
from syncline.bench.training import Options, joined, synchronise
from syncline.cluster.ranks import Place, Report, run_ranks, warm_up
from syncline.engine import Sync, attach
from syncline.plan.auto_spec import parse_auto
from syncline.stats import mean
from syncline.train.data.sampler import Sampler
from syncline.train.workload import Phase

LOOPBACK = "loopback"
"""The network of ranks that are connected by the loopback interface, without a limit."""


def train(job: Job, step_done: Callable[[int], None]) -> dict[str, Any]:
    """Start the ranks, train, and return the row; `step_done(steps)` is called after each step."""
    bandwidth = "" if job.network == LOOPBACK else job.network
    options = Options(job.device, (job.codec,), ranks=job.workers, bandwidth=bandwidth)
    warm_up()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-")))
        made, *_ = run_ranks(
            _run_rank,
            places(options, stack),
            (job, options, str(folder / "rendezvous")),
            logs=folder,
            on_message=lambda rank, steps: step_done(steps) if rank == 0 else None,
        )
    result: dict[str, Any] = made
    return result


def _run_rank(place: Place, payload: tuple[Job, Options, str], report: Report) -> dict[str, Any]:
    """Train as one rank, and return the row; losses are means over the ranks, seconds this rank's own."""
    job, options, store = payload
    with joined(options, place, store) as device:
        parts = prepare(job, device, rank=place.rank)
        where = {"batch": job.batch, "seed": job.seed, "rank": place.rank, "workers": job.workers}
        sampler = Sampler(len(parts.workload.train), **where)
        phases = parts.workload.phases
        # `auto` measures the codecs at once: in a longer job it does so when that costs little of the time trained.
        tuned: Any = {"tune": "full"} if parse_auto(job.codec) else {"compress": None} if job.codec == DENSE else {}
        syncs = [
            attach(phase.module, optimizer, **{"compress": job.codec, "plan_cache": False, **tuned})
            for phase, optimizer in zip(phases, parts.optimizers, strict=True)
        ]
        losses: dict[str, list[Tensor]] = {phase.name: [] for phase in phases}
        ends: list[float] = []
        dist.barrier()
        began = time.perf_counter()
        for step in range(job.steps):
            epoch, indices = sampler(step)
            batch = on_device(parts.workload.train.batch(indices, epoch=epoch), device)
            for phase, optimizer, schedule in zip(phases, parts.optimizers, parts.schedules, strict=True):
                optimizer.zero_grad()
                loss = phase.module(*batch)
                loss.backward()
                optimizer.step()
                schedule.step()
                losses[phase.name].append(loss.detach())
            ends.append(time.perf_counter() - began)
            report(step + 1)
        for sync in syncs:
            sync.wait()
        synchronise(device)
        ends[-1] = time.perf_counter() - began
        curves = torch.stack([torch.stack(curve) for curve in losses.values()])
        dist.all_reduce(curves)
        means = dict(zip(losses, (curves / job.workers).tolist(), strict=True))
        score = evaluate(parts.workload, device)
        changes = [str(change) for sync in syncs if sync.auto is not None for change in sync.auto.changes]
        chosen, errors = _shares(phases, syncs), _errors(syncs)
        made = row(job, means, score=score, seconds=ends, chosen=chosen, errors=errors, changes=changes)
        for sync in syncs:
            sync.close()
        return made


def _errors(syncs: Sequence[Sync]) -> dict[str, float]:
    """What the codecs of `auto` lost: budget, mean and largest error that the guard read, and its changes of codecs."""
    guards = [sync.auto.guard for sync in syncs if sync.auto is not None and sync.auto.guard is not None]
    read = [error for guard in guards for _, error in guard.readings]
    if not read:
        return {}
    changes = sum(len(guard.changes) for guard in guards)
    budget = guards[0].rules.budget.error
    return {"budget": budget, "mean": mean(read), "largest": max(read), "readings": len(read), "changes": changes}


def _shares(phases: Sequence[Phase], syncs: Sequence[Sync]) -> dict[str, float]:
    """The codecs of the plans in use, with their share of the gradients' values."""
    counts: dict[str, int] = {}
    for phase, sync in zip(phases, syncs, strict=True):
        sizes = {name: parameter.numel() for name, parameter in phase.module.named_parameters()}
        for unit in sync.plan.units:
            counts[unit.codec] = counts.get(unit.codec, 0) + sum(sizes[name] for name in unit.parameters)
    return {codec: count / sum(counts.values()) for codec, count in sorted(counts.items())}
