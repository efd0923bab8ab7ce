"""What one rank does for one strategy: join its peers, build the workload, train, report."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline._compat import Store
from syncline.errors import UsageError
from syncline.trace import Recorder
from syncline.trace.merge.clocks import host_id
from syncline.trace.record.cpu_time import available_cores
from syncline.trace.record.environment import ignore_variables
from syncline.trace.record.overhead import recording_cost
from syncline.train.checkpoint.files import cut_logs
from syncline.train.checkpoint.snapshot import Snapshots
from syncline.train.config import Train
from syncline.train.rank.clock import RunClock
from syncline.train.rank.loop import Gate, Loop, Progress
from syncline.train.rank.randomness import seed_all
from syncline.train.rank.sampler import Sampler
from syncline.train.rank.wire_bytes import read_counters
from syncline.train.strategies import Context, Strategy, load
from syncline.train.strategies.base import total_bytes
from syncline.train.strategies.syncline import keep_plans, predicted_ms
from syncline.train.workload import Workload, build, load_optimizer


@dataclass(frozen=True)
class Assignment:
    """One strategy's run, the same for all its ranks. `train.batch` is this run's."""

    strategy: str
    train: Train
    workers: int
    servers: int
    folder: str
    count_wire: bool
    cores: int
    launched_ns: int
    checkpoints: str = ""
    """The folder of the run's checkpoints."""
    resume: str = ""
    """The checkpoint to go on from; empty starts anew."""
    first_step: int = 0


def run_rank(
    assignment: Assignment,
    *,
    rank: int,
    local_rank: int,
    node: int,
    store: Store,
    progress: Progress,
    gate: Gate | None = None,
) -> dict[str, Any]:
    """Train as `rank`; returns a plain record of what it saw, spans included, for `assemble`.

    With a `gate` it trains in turns, as long as the gate lets it.
    """
    entered = time.perf_counter_ns()
    ignore_variables()
    train, strategy = assignment.train, load(assignment.strategy)
    device = _device(train.device, local_rank)
    torch.set_num_threads(train.threads or max(1, assignment.cores // (assignment.workers + assignment.servers)))
    with _process_group(assignment, strategy, rank, store, device) as group:
        clock = RunClock(timeout_s=train.timeout_s)
        joined = time.perf_counter_ns()
        seed_all(train.seed * 10_007 + rank)
        workload = build(train.model, train.data, seed=train.seed).to(device)
        recorder = Recorder(rank=rank, device=device)
        context = Context(rank=rank, workers=assignment.workers, recorder=recorder, group=group)
        trainable = [[p for p in phase.module.parameters() if p.requires_grad] for phase in workload.phases]
        built = time.perf_counter_ns()
        shapes = [p.shape for parameters in trainable for p in parameters]
        element = max((p.element_size() for parameters in trainable for p in parameters), default=4)
        record: dict[str, Any] = {
            "rank": rank,
            "node": node,
            "host": socket.gethostname(),
            "boot_id": host_id(),
            "cores": available_cores(),
            "backend": dist.get_backend() if dist.is_initialized() else "",
            "startup_ms": {
                "launch": (entered - assignment.launched_ns) / 1e6,
                "rendezvous": (joined - entered) / 1e6,
                "build": (built - joined) / 1e6,
            },
            "synchronised_bytes": 0 if strategy.alone else total_bytes(shapes, element),
            "phases": len(workload.phases),
            "theory": asdict(strategy.traffic(shapes, element, rank=rank, workers=assignment.workers)),
        }
        steps = train.steps or len(workload.train) // train.batch
        if rank >= assignment.workers:
            _serve(assignment, strategy, trainable, context, record, steps=train.epochs * steps - assignment.first_step)
        else:
            _train(assignment, strategy, workload, context, device, record, progress, steps=steps, gate=gate)
            record["buffer_divergence"] = _buffer_divergence(workload, assignment.workers, group)
        record["clock"] = clock.finish()
        # An aggregator counts its steps from 0.
        shift = assignment.first_step if rank >= assignment.workers else 0
        record["spans"] = [
            replace(span, step=span.step + shift).to_row() for span in recorder.spans()
        ]  # fmt: skip
        record["spans_dropped"], record["whole_from"] = recorder.dropped, recorder.first_complete_step
        record["usage"] = [[step + shift, cpu, delay] for step, cpu, delay in recorder.cpu_times.rows]
        record["recorder"] = recording_cost(recorder)
        return record


def _train(
    assignment: Assignment,
    strategy: Strategy,
    workload: Workload,
    context: Context,
    device: torch.device,
    record: dict[str, Any],
    progress: Progress,
    *,
    steps: int,
    gate: Gate | None,
) -> None:
    train, folder = assignment.train, Path(assignment.folder)
    with ExitStack() as stack:
        optimizers, synchronisers = [], []
        for phase in workload.phases:
            optimizer = load_optimizer(train.optimizer or phase.optimizer, phase.module.parameters())
            synchroniser = strategy.attach(phase.module, context, optimizer)
            stack.callback(synchroniser.close)
            synchronisers.append(synchroniser)
            optimizers.append(synchroniser.optimizer or optimizer)
        snapshots = Snapshots(
            folder=Path(assignment.checkpoints),
            strategy=assignment.strategy,
            train=train,
            steps=steps,
            context=context,
            device=device,
            phases=workload.phases,
            synchronisers=synchronisers,
            optimizers=optimizers,
        )
        loop = Loop(
            workload=workload,
            synchronisers=synchronisers,
            optimizers=optimizers,
            sampler=Sampler(
                len(workload.train), batch=train.batch, seed=train.seed, rank=context.rank, workers=assignment.workers
            ),
            recorder=context.recorder,
            device=device,
            epochs=train.epochs,
            steps=steps,
            test_samples=train.test_samples,
            count_wire=assignment.count_wire,
            log=folder / f"rank{context.rank}.steps.jsonl",
            progress=progress,
            synchronised_bytes=record["synchronised_bytes"],
            checkpoint_every=train.checkpoint_every,
            checkpoint=snapshots.save,
            gate=gate,
        )
        begun = None
        if assignment.resume:
            loop.rehearse(assignment.first_step)
            begun = snapshots.restore(Path(assignment.resume))
            cut_logs(folder, rank=context.rank, workers=assignment.workers, after=assignment.first_step)
            record["earlier_ms"], record["resumed_at"] = list(begun.step_ms), begun.resumed_at
        outcome = loop.run(begun)
        if context.rank == 0:
            keep_plans(synchronisers, folder, strategy=assignment.strategy)
        record["prediction_ms"] = predicted_ms(synchronisers)
    record["losses"], record["epochs"], record["accuracy"] = outcome.losses, outcome.epochs, outcome.accuracy
    record["wire"] = None if outcome.wire is None else asdict(outcome.wire)


def _serve(
    assignment: Assignment,
    strategy: Strategy,
    trainable: list[list[torch.nn.Parameter]],
    context: Context,
    record: dict[str, Any],
    *,
    steps: int,
) -> None:
    before = read_counters() if assignment.count_wire else None
    strategy.serve(trainable, context, steps=steps)
    if before is not None:
        moved = read_counters().since(before)
        record["wire"] = {"sent": moved.sent / steps, "received": moved.received / steps} if steps else None


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("device 'cuda' was asked for and torch sees no GPU: use --set train.device=cpu")
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if name != "cpu":
        raise UsageError(f"unknown device '{name}': use auto, cpu or cuda")
    return torch.device("cpu")


@contextmanager
def _process_group(
    assignment: Assignment, strategy: Strategy, rank: int, store: Store, device: torch.device
) -> Iterator[dist.ProcessGroup | None]:
    world_size = assignment.workers + assignment.servers
    if strategy.alone:
        yield None
        return
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=assignment.train.timeout_s),
        device_id=device if cuda else None,
    )
    try:
        group = dist.new_group(list(range(assignment.workers))) if assignment.servers else dist.group.WORLD
        yield group
        dist.barrier()  # a rank that leaves early would close connections that others still use
    finally:
        dist.destroy_process_group()


def _buffer_divergence(workload: Workload, workers: int, group: dist.ProcessGroup | None) -> float:
    """The largest difference between the ranks' floating-point buffers (BatchNorm statistics)."""
    buffers = [
        b.detach().float().flatten() for p in workload.phases for b in p.module.buffers() if b.is_floating_point()
    ]
    if workers == 1 or not buffers:
        return 0.0
    low = torch.cat(buffers)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return float((high - low).max())
