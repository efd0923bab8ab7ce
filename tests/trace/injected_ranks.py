"""A training loop of sleeps, spins and real Gloo messages, with causes of slowness that are put in on purpose."""

import os
import time
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from ranks import run_ranks
from syncline.trace import Recorder, Span, Trace
from syncline.trace.analysis.analyze import analyze

HOST = "host"


@dataclass(frozen=True)
class Job:
    """What every step of every rank does; `delays` are seconds of sleep put in, by rank and lane."""

    steps: int = 16
    forward_s: float = 0.004
    backward_s: float = 0.008
    spin: int = 0
    """Rounds of work for a core in forward and in backward."""
    sizes: tuple[int, ...] = (5_000, 20_000)
    """Elements of the messages."""
    delays: dict[tuple[int, str], float] = field(default_factory=dict)
    cores: int = 0
    """Cores that all ranks together may use; 0 leaves it as it is."""


def run(job, world):
    """The spans of all ranks with waits split off, the metadata, and how often each rank's delay was met."""
    records = run_ranks(train, world, job)
    spans = Trace.of(Span.from_row(rank, row) for rank, (rows, _, _) in enumerate(records) for row in rows).spans
    metadata = {
        "world_size": world,
        "hosts": {str(rank): HOST for rank in range(world)},
        "cores": {HOST: job.cores or len(os.sched_getaffinity(0))},
        "usage": {str(rank): [list(row) for row in usage] for rank, (_, usage, _) in enumerate(records)},
    }
    return spans, metadata, [fired for _, _, fired in records]


def analysis(job, world):
    """The analysis of a job, and how often each rank's delay was met."""
    spans, metadata, fired = run(job, world)
    return analyze(Trace.of(spans, metadata=metadata)), fired


def without_delays(job):
    return replace(job, delays={})


def train(rank, world, job):
    if job.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.cores])
    recorder = Recorder(rank=rank)
    tensors = [torch.zeros(size) for size in job.sizes]
    fired = 0

    def delayed(lane):
        nonlocal fired
        if (rank, lane) in job.delays:
            time.sleep(job.delays[rank, lane])
            fired += 1

    def work(lane, seconds):
        with recorder.span(lane):
            time.sleep(seconds)
            spin(job.spin)
            delayed(lane)

    dist.barrier()
    for step in range(job.steps):
        recorder.step = step
        begin = recorder.mark("step")
        with recorder.span("data"):
            delayed("data")
        work("forward", job.forward_s)
        work("backward", job.backward_s)
        for number, tensor in enumerate(tensors):
            with recorder.span("exchange", "all-reduce", unit=f"w{number}", bytes=tensor.nbytes):
                dist.all_reduce(tensor)
        with recorder.span("update"):
            tensors[0].zero_()
        recorder.add("step", "step", begin, recorder.mark("step"))
    rows = [span.to_row() for span in recorder.spans()]
    return rows, recorder.cpu_times.rows, fired


def spin(rounds):
    """Work for one core: the same number of instructions whenever it runs."""
    total = 0
    for number in range(rounds):
        total += number
    return total
