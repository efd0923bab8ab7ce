"""One model trained in several ways (alone, under DDP, attached), as the ranks of `overhead` and `recorder` do it."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from syncline._compat.ddp import GradBucket
from syncline._compat.groups import FileStore
from syncline.cluster.ranks import Place
from syncline.engine import attach
from syncline.engine.tuning.drift import WINDOW
from syncline.engine.tuning.tuner import TUNED
from syncline.errors import UsageError
from syncline.spec import Call, parse_one
from syncline.train.workload import Workload, build, load_optimizer


def _bf16_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook under another name: by its own, DDP refuses it on a CPU."""
    return bf16_compress_hook(state, bucket)


def _hook_of(call: Call) -> tuple[Any, Any] | None:
    """The state and the function that send the buckets of a kind of DDP; None: they are sent as they are."""
    if call.name == "ddp-bf16":
        return None, _bf16_hook
    if call.name == "ddp-powersgd":
        rank = int(call.kwargs.get("rank", 4))
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, warm_start=True)
        return state, powerSGD_hook
    return None


DDP = ("ddp", "ddp-bf16", "ddp-powersgd")
"""Kinds of DDP: dense, in BF16, and with torch's own PowerSGD."""


_MOST_WARM_UP, _WAIT_S = 2 * TUNED + 40 * WINDOW, 90.0
"""Steps of a warm-up at most, and seconds in which it waits for measurements that the tuner has put off."""
_AFTER_PLAN = 5
"""Steps after a plan was found on CUDA: its launches are captured in them."""


@dataclass(frozen=True)
class Options:
    """What is measured: one model on fixed random samples, the ways to train it, and the number of repetitions."""

    device: str
    ways: tuple[str, ...]
    model: str = "resnet50"
    data: str = "synthetic(image_size=32)"
    # A tiny learning rate: when the loss reaches zero, gradients are denormal numbers, which are slow on a CPU.
    optimizer: str = "sgd(lr=0.000001, momentum=0.9)"
    batch: int = 2
    ranks: int = 2
    blocks: int = 7
    steps: int = 10
    """Steps per block."""
    warm_up: int = 5
    threads: int = 1
    seed: int = 0
    timeout_s: float = 300.0
    bandwidth: str = ""
    """Of the links between ranks, each on an emulated node; empty: the loopback interface."""
    memory: bool = True
    """Whether memory is measured, too."""
    seconds: float = 1e9
    """Time after which no further block begins, once there are two."""
    issue_steps: int = 15
    """Steps whose issue time is measured, on CUDA."""
    plan_cache: str = ""
    """A folder that attached models use as their plan cache; empty: none."""


def compression(way: str) -> str | None:
    """The codec of a way `syncline(codec)`; None without compression.

    >>> compression("syncline(powersgd(rank=4) | bf16)")
    'powersgd(rank=4) | bf16'
    """
    return way.partition("(")[2].removesuffix(")") or None


@lru_cache(maxsize=1)
def _built(model: str, data: str, seed: int) -> Workload:
    """The workload, on the CPU; every way trains a copy of its model."""
    return build(model, data, seed=seed)


class Way:
    """A new model with its optimizer, trained `alone`, under a kind of DDP, or `syncline(CODEC)`.

    `ddp(bucket_mb=5)`, `ddp-bf16` and `ddp-powersgd(rank=4)` are kinds of DDP.
    """

    def __init__(
        self, name: str, options: Options, device: torch.device, *, plan_cache: str = "", connected: bool = True
    ) -> None:
        """`plan_cache`: a folder with the plans of earlier runs. `connected=False`: `connect` is called later."""
        self.name, self._plan_cache = name, plan_cache
        self.sync: Any = None
        workload = _built(options.model, options.data, options.seed)
        (phase,) = workload.phases
        first = dist.get_rank() * options.batch
        indices = torch.arange(first, first + options.batch)
        self._batch = tuple(part.to(device) for part in workload.train.batch(indices))
        self.module: Any = copy.deepcopy(phase.module).to(device)
        self.parameters = list(self.module.parameters())
        self.optimizer = load_optimizer(options.optimizer, self.parameters)
        self.loss: Any = None
        if connected:
            self.connect()

    def connect(self) -> None:
        """Wrap the model in DDP, or attach it."""
        call = parse_one(self.name)
        if call.name in DDP:
            bucket = float(call.kwargs.get("bucket_mb", 25))
            self.module = DistributedDataParallel(self.module, bucket_cap_mb=bucket, gradient_as_bucket_view=True)
            if (hook := _hook_of(call)) is not None:
                self.module.register_comm_hook(*hook)
        elif call.name == "syncline":
            cache = self._plan_cache or False
            self.sync = attach(self.module, self.optimizer, compress=compression(self.name), plan_cache=cache)
        elif self.name != "alone":
            raise UsageError(f"'{self.name}' is not a way to train: use alone, {', '.join(DDP)} or syncline(CODEC)")

    def warm_up(self, least: int) -> None:
        """Train until an attached model has its plan and will not soon look for another, at least this many steps."""
        auto = None if self.sync is None else self.sync.auto
        began = time.perf_counter()
        for step in range(_MOST_WARM_UP):
            soon = auto is not None and auto.wait_to_measure < _WAIT_S - (time.perf_counter() - began)
            if step >= least and (auto is None or (auto.settled and auto.confirmed and not soon)):
                break
            self.step()
        for _ in range(_AFTER_PLAN if self.sync is not None and self._batch[0].is_cuda else 0):
            self.step()
        self.wait()

    def close(self) -> None:
        """Leave the process group."""
        if self.sync is not None:
            self.sync.close()

    def forward_backward_step(self) -> list[float]:
        """Run a step without `zero_grad`; the milliseconds of the training thread in forward, backward and step."""
        marks = [time.perf_counter()]
        self.loss = self.module(*self._batch)
        marks.append(time.perf_counter())
        self.loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in pairwise(marks)]

    def step(self) -> list[float]:
        """Run a whole step; the milliseconds of forward, backward, step and zero_grad."""
        times = self.forward_backward_step()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        return [*times, (time.perf_counter() - began) * 1e3]

    def wait(self) -> None:
        """Return when nothing is in flight."""
        if self.sync is not None:
            self.sync.wait()
        synchronise(self.parameters[0].device)

    def state_bytes(self) -> int:
        """Bytes that its codecs keep from step to step."""
        return 0 if self.sync is None else sum(t.nbytes for t in self.sync.state_dict().values() if t.dim())


@dataclass
class BlockTimes:
    """Milliseconds per step, one value per block: wall time, CPU time of the process, CPU time of this thread."""

    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)

    @contextmanager
    def block(self, steps: int) -> Iterator[None]:
        """Time a block of `steps` steps."""
        clocks = (time.perf_counter, time.process_time, time.thread_time)
        began = [clock() for clock in clocks]
        yield
        ended = [clock() for clock in clocks]
        for values, start, end in zip((self.step, self.cpu, self.thread), began, ended, strict=True):
            values.append((end - start) * 1e3 / steps)


@contextmanager
def joined(options: Options, place: Place, store: str) -> Iterator[torch.device]:
    """Join the process group, and give the rank's device."""
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(store, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=options.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def synchronise(device: torch.device) -> None:
    """Return when the device has finished all work that was issued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
