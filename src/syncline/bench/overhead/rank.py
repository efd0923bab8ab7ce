"""One rank of `bench overhead`: the same model trained in several ways, in blocks of steps that take turns."""

import gc
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from syncline._compat import FileStore, NoSubclasses
from syncline.bench.timing import Clock
from syncline.cluster.ranks import Place, Report
from syncline.engine import attach
from syncline.train.workload import build, load_optimizer

PHASES = ("forward", "backward", "step", "zero_grad")
# ResNet-50 has so many; a way that trained fewer would be another comparison.
TENSORS = {"resnet50": 161}
SETTLED = 18
"""Steps after which an attached model has its plan, and has looked at the link."""
_LOOKS = 3
"""Steps in which memory is looked at."""
_ISSUES = 15
"""Steps whose issuing is timed, on CUDA."""


@dataclass(frozen=True)
class Setting:
    """What is measured: one model on fixed random samples, the ways to train it, and how often."""

    device: str
    ways: tuple[str, ...]
    model: str = "resnet50"
    data: str = "synthetic(image_size=32)"
    # Hardly a step: a loss that reaches zero leaves gradients of denormal numbers, which are slow on a CPU.
    optimizer: str = "sgd(lr=0.000001, momentum=0.9)"
    batch: int = 2
    ranks: int = 2
    blocks: int = 7
    steps: int = 10
    """Of a block."""
    warm_up: int = 5
    threads: int = 1
    seed: int = 0
    timeout_s: float = 300.0


def compression(way: str) -> str | None:
    """The codec of a way `syncline(codec)`; None where it is dense.

    >>> compression("syncline(powersgd(rank=4) | bf16)")
    'powersgd(rank=4) | bf16'
    """
    return way.partition("(")[2].removesuffix(")") or None


class Way:
    """A fresh model with its optimizer: trained alone, under DDP, or attached."""

    def __init__(self, name: str, setting: Setting, device: torch.device) -> None:
        self.name = name
        self.sync: Any = None
        workload = build(setting.model, setting.data, seed=setting.seed).to(device)
        (phase,) = workload.phases
        first = dist.get_rank() * setting.batch
        indices = torch.arange(first, first + setting.batch)
        self._batch = tuple(part.to(device) for part in workload.train.batch(indices))
        self.module: Any = phase.module
        self.parameters = list(phase.module.parameters())
        self.optimizer = load_optimizer(setting.optimizer, self.parameters)
        self.loss: Any = None
        if name == "ddp":
            self.module = DistributedDataParallel(phase.module, gradient_as_bucket_view=True)
        elif name != "alone":
            self.sync = attach(phase.module, self.optimizer, compress=compression(name))

    def until_stepped(self) -> list[float]:
        """Forward, backward and step; the milliseconds that the training thread was held up in each."""
        marks = [time.perf_counter()]
        self.loss = self.module(*self._batch)
        marks.append(time.perf_counter())
        self.loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in pairwise(marks)]

    def step(self) -> list[float]:
        """A whole step; milliseconds in the order of `PHASES`."""
        times = self.until_stepped()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        return [*times, (time.perf_counter() - began) * 1e3]

    def settle(self) -> None:
        """Return when nothing of it is in flight."""
        if self.sync is not None:
            self.sync.wait()
        synchronise(self.parameters[0].device)

    def state_bytes(self) -> int:
        """What its codecs keep from step to step."""
        return 0 if self.sync is None else sum(t.nbytes for t in self.sync.state_dict().values() if t.dim())


@dataclass
class Record:
    """What one rank saw of one way: milliseconds a step, a value a block, and bytes."""

    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)
    phases: list[list[float]] = field(default_factory=list)
    issue: list[float] = field(default_factory=list)
    issue_phases: list[list[float]] = field(default_factory=list)
    kept_busy: list[bool] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    loss: float = math.nan
    plan: dict[str, int] = field(default_factory=dict)


def run_rank(place: Place, payload: tuple[Setting, str, str], report: Report) -> dict[str, Any]:
    """Build all ways, measure them in turn; returns plain records by way."""
    setting, store, _ = payload
    with joined(setting, place, store) as device:
        return _measure(setting, device, report)


@contextmanager
def joined(setting: Setting, place: Place, store: str) -> Iterator[torch.device]:
    """The rank's device, with its peers met."""
    torch.set_num_threads(setting.threads)
    device = torch.device("cpu")
    if setting.device == "cuda":
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(store, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=setting.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _measure(setting: Setting, device: torch.device, report: Report) -> dict[str, Any]:
    Way("alone", setting, device).step()  # what libraries allocate once is nobody's
    ways: list[Way] = []
    records = {name: Record() for name in setting.ways}
    for name in setting.ways:
        base = _held(device)
        way = Way(name, setting, device)
        expected = TENSORS.get(setting.model.partition("(")[0], len(way.parameters))
        assert len(way.parameters) == expected, f"{setting.model} has {len(way.parameters)} tensors, not {expected}"
        for _ in range(max(setting.warm_up, SETTLED)):
            way.step()
        records[name].memory = _memory(way, device, base)
        ways.append(way)
        report(f"{name}: warm")
    for block in range(setting.blocks):
        for way in ways:
            _block(way, records[way.name], setting.steps, device)
        report(f"block {block + 1} of {setting.blocks}")
    if device.type == "cuda":
        clock = Clock(device)
        for _ in range(_ISSUES):
            for way in ways:
                _issue(way, records[way.name], clock)
    for way in ways:
        records[way.name].loss = float(way.loss.detach())
        if way.sync is not None:
            plan = way.sync.plan
            records[way.name].plan = {"units": len(plan.units), "launches": len(plan.order)}
            way.sync.close()
    dist.barrier()
    gradient = sum(p.nbytes for p in ways[0].parameters)
    values = {name: vars(record) for name, record in records.items()}
    return {"ways": values, "tensors": len(ways[0].parameters), "gradient_bytes": gradient}


def _block(way: Way, record: Record, steps: int, device: torch.device) -> None:
    """Steps in a row, from all ranks' start to the end of the last update."""
    gc.collect()
    dist.barrier()
    synchronise(device)
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    phases = [way.step() for _ in range(steps)]
    way.settle()
    record.step.append((time.perf_counter() - wall) * 1e3 / steps)
    record.cpu.append((time.process_time() - cpu) * 1e3 / steps)
    record.thread.append((time.thread_time() - thread) * 1e3 / steps)
    record.phases.append([statistics.mean(column) for column in zip(*phases, strict=True)])


def _issue(way: Way, record: Record, clock: Clock) -> None:
    """How long the host needs to issue a step that follows another, while the device has other work."""
    way.settle()
    first = clock.mark()
    clock.plug()
    plug = max(0.1, clock.between(first, clock.mark()))
    host = statistics.median(sum(phases) for phases in record.phases)
    dist.barrier()
    way.step()
    for _ in range(math.ceil(1.5 * host / plug)):
        clock.plug()
    end = clock.mark()
    phases = way.step()
    record.kept_busy.append(not end.query())
    record.issue.append(sum(phases))
    record.issue_phases.append(phases)
    way.settle()


def _memory(way: Way, device: torch.device, base: int) -> dict[str, float]:
    """Bytes that came with a way: right after `step()`, when nothing is in flight any more, and at the peak."""
    after_step, after_wait = [], []
    way.settle()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_LOOKS):
        gc.collect()
        way.until_stepped()
        after_step.append(_held(device) - base)
        way.settle()
        after_wait.append(_held(device) - base)
        way.optimizer.zero_grad()
    found = {"after_step": statistics.median(after_step), "after_wait": statistics.median(after_wait)}
    if device.type == "cuda":
        way.settle()
        found["peak"] = torch.cuda.max_memory_allocated(device) - base
    return found | {"state": way.state_bytes()}


def _held(device: torch.device) -> int:
    """Bytes allocated on CUDA; on the CPU those of all tensors that Python knows."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages: dict[int, int] = {}
    with NoSubclasses():  # a tensor in flight is counted, not waited for
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and thing.device.type == "cpu" and thing.layout is torch.strided:
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def synchronise(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
