"""The main function of one rank: join the other ranks, build the workload, train or aggregate, and report."""

import socket
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline._compat.groups import Store
from syncline.cluster.ranks import Place
from syncline.trace import Recorder
from syncline.trace.merge.clocks import host_id
from syncline.trace.merge.merge_ranks import Part
from syncline.trace.record.cpu_time import available_cores
from syncline.trace.record.overhead import recording_cost
from syncline.trace.record.session import ignore_variables
from syncline.train.checkpoint.files import cut_logs
from syncline.train.checkpoint.history import History
from syncline.train.checkpoint.randomness import seed_all
from syncline.train.checkpoint.resume import Resume
from syncline.train.checkpoint.start import load_start
from syncline.train.config import CHECKPOINTS, Train
from syncline.train.data.sampler import Sampler
from syncline.train.rank.join import ClockMeasurement, choose_device, join_workers
from syncline.train.rank.loop import Gate, Loop
from syncline.train.rank.memory import PeakMemory
from syncline.train.rank.network_counters import read_counters
from syncline.train.rank.record import RankRecord
from syncline.train.rank.snapshot import Snapshots
from syncline.train.rank.step_log import Progress, StepLog
from syncline.train.strategies import Context, load
from syncline.train.strategies.base import Shrink
from syncline.train.strategies.syncline import keep_plans, predicted_ms
from syncline.train.workload import Workload, build, load_optimizer


@dataclass(frozen=True)
class RunSpec:
    """One strategy at one world size; `train.batch` and `train.steps` are this run's."""

    strategy: str
    workers: int
    servers: int
    train: Train

    @property
    def ranks(self) -> int:
        """Workers and aggregators."""
        return self.workers + self.servers


@dataclass(frozen=True)
class Assignment:
    """What the ranks of one run are started with, the same for all of them."""

    run: RunSpec
    folder: Path
    """The logs of this run, `RUN/runs/<strategy>`."""
    count_network: bool
    cores: int
    """Cores that all ranks of the run share."""
    launched_ns: int
    resume: Resume | None = None

    @property
    def first_step(self) -> int:
        """The first step that is trained now."""
        return 0 if self.resume is None else self.resume.step


def run_rank(
    assignment: Assignment, place: Place, *, store: Store, progress: Progress, gate: Gate | None = None
) -> RankRecord:
    """Train as rank `place.rank` and return its record. A `gate` makes it train in turns."""
    entered = time.perf_counter_ns()
    ignore_variables()
    run, rank = assignment.run, place.rank
    train, strategy = run.train, load(run.strategy)
    device = choose_device(train.device, place.local_rank)
    torch.set_num_threads(train.threads or max(1, assignment.cores // run.ranks))
    size = {"workers": run.workers, "servers": run.servers}
    joining = join_workers(store, device, rank=rank, timeout_s=train.timeout_s, **size)
    with nullcontext() if strategy.alone else joining as group:
        clock = ClockMeasurement(timeout_s=train.timeout_s)
        joined = time.perf_counter_ns()
        memory = PeakMemory(device)
        seed_all(train.seed * 10_007 + rank)
        workload = build(train.model, train.data, seed=train.seed).to(device)
        notes = []
        if train.start and assignment.resume is None:
            notes.append(load_start(Path(train.start), [phase.module for phase in workload.phases]))
        recorder = Recorder(rank=rank, device=device)
        some = torch.arange(min(len(workload.train), max(1, train.batch // run.workers)))
        shrink = Shrink(
            train.freeze,
            train.pipe,
            train.dp,
            train.cache,
            train.cache_disk,
            train.cache_gpu,
            samples=len(workload.train),
            epochs=train.epochs,
            node=place.node,
            example=lambda: tuple(t.to(device) for t in workload.train.batch(some)),
        )
        context = Context(rank=rank, workers=run.workers, recorder=recorder, group=group, shrink=shrink)
        trainable = [[p for p in phase.module.parameters() if p.requires_grad] for phase in workload.phases]
        built = time.perf_counter_ns()
        shapes = [p.shape for parameters in trainable for p in parameters]
        element = max((p.element_size() for parameters in trainable for p in parameters), default=4)
        steps = train.steps or len(workload.train) // train.batch
        if rank < run.workers:
            log = StepLog(
                assignment.folder / f"rank{rank}.steps.jsonl",
                recorder,
                batch=train.batch,
                phases=len(workload.phases),
                steps=steps,
                log_every=train.log_every,
                progress=progress,
            )
            outcome = _train(assignment, workload, context, log, device=device, steps=steps, gate=gate, memory=memory)
            outcome["buffer_divergence"] = _buffer_divergence(workload, context)
            shift = 0
        else:
            shift = assignment.first_step  # an aggregator counts its steps from 0
            steps = train.epochs * steps - shift
            before = read_counters() if assignment.count_network and steps else None
            strategy.serve([phase.module for phase in workload.phases], context, steps=steps)
            outcome = {
                "synchronised_bytes": 0.0,
                "network": before and read_counters().per_step_since(before, steps=steps),
            }
        part = Part(
            rank,
            [replace(span, step=span.step + shift) if shift else span for span in recorder.spans()],
            host_id(),
            clock.finish(),
            cores=available_cores(),
            cpu_times=[[step + shift, cpu, delay] for step, cpu, delay in recorder.cpu_times.rows],
            recording_cost=recording_cost(recorder),
            node=f"node {place.node}",
        )
        return RankRecord(
            part=part,
            node=place.node,
            host=socket.gethostname(),
            backend=dist.get_backend() if dist.is_initialized() else "",
            startup_ms={
                "launch": (entered - assignment.launched_ns) / 1e6,
                "rendezvous": (joined - entered) / 1e6,
                "build": (built - joined) / 1e6,
            },
            phases=len(workload.phases),
            # Stages send activations, and another share of the gradients after each reshape: no formula has that.
            theory=None if shrink.needs_pipeline else strategy.traffic(shapes, element, rank=rank, workers=run.workers),
            spans_dropped=recorder.dropped,
            first_complete_step=recorder.first_complete_step,
            notes=[*notes, *outcome.pop("notes", [])],
            **outcome,
        )


def _train(
    assignment: Assignment,
    workload: Workload,
    context: Context,
    log: StepLog,
    *,
    device: torch.device,
    steps: int,
    gate: Gate | None,
    memory: PeakMemory,
) -> dict[str, Any]:
    """Train all epochs of `steps` steps; returns fields of the `RankRecord`."""
    run, folder, train = assignment.run, assignment.folder, assignment.run.train
    rank, workers, strategy = context.rank, context.workers, load(run.strategy)
    with ExitStack() as stack:
        optimizers, synchronisers = [], []
        for phase in workload.phases:
            optimizer = load_optimizer(train.optimizer or phase.optimizer, phase.module.parameters())
            synchroniser = strategy.attach(phase.module, context, optimizer)
            stack.callback(synchroniser.close)
            synchronisers.append(synchroniser)
            optimizers.append(synchroniser.optimizer or optimizer)
        snapshots = Snapshots(folder.absolute().parent.parent / CHECKPOINTS, run.strategy)
        loop = Loop(
            workload=workload,
            synchronisers=synchronisers,
            optimizers=optimizers,
            sampler=Sampler(len(workload.train), batch=train.batch, seed=train.seed, rank=rank, workers=workers),
            context=context,
            device=device,
            log=log,
            train=train,
            steps=steps,
            count_network=assignment.count_network,
            checkpoint=snapshots.save,
            gate=gate,
            memory=memory,
        )
        history = History()
        if assignment.resume is not None:
            loop.rehearse(assignment.first_step)
            history = snapshots.restore(loop, assignment.resume.checkpoint)
            cut_logs(folder, rank=rank, workers=workers, after=assignment.first_step)
        network = loop.run(history)
        if rank == 0:
            try:
                keep_plans(synchronisers, folder, strategy=run.strategy)
            except OSError as error:  # a full disk must not cost a finished training
                print(f"the plan is not kept: {error}", file=sys.stderr)
        return {
            "history": history,
            "synchronised_bytes": log.synchronised_bytes,
            "network": network,
            "prediction_ms": predicted_ms(synchronisers),
            "peak_memory_bytes": memory.peak(),
            "train_accuracy": loop.train_accuracy(),
            "notes": [note for synchroniser in synchronisers for note in synchroniser.notes()],
        }


def _buffer_divergence(workload: Workload, context: Context) -> float:
    """The largest difference between the ranks' floating-point buffers (BatchNorm statistics)."""
    buffers = [
        b.detach().float().flatten() for p in workload.phases for b in p.module.buffers() if b.is_floating_point()
    ]
    if context.workers == 1 or not buffers:
        return 0.0
    low = torch.cat(buffers)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=context.group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=context.group)
    return float((high - low).max())
