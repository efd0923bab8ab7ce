"""One rank of `bench pipeline`: fine-tune the same model in every way, and time each epoch."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from syncline.bench.pipeline.options import Options, Way
from syncline.bench.pipeline.pretrain import arithmetic, load_pretrained, one_cycle
from syncline.bench.training import Options as RankOptions
from syncline.bench.training import joined, synchronise
from syncline.cluster.ranks import Place, Report
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.cache import ActivationCache, shared_cache
from syncline.pipeline.freeze.freezer import Freezer
from syncline.pipeline.measure import measure_sublayers
from syncline.pipeline.mesh import share
from syncline.pipeline.run import Pipeline
from syncline.train.data.sampler import Sampler
from syncline.train.rank.memory import PeakMemory
from syncline.train.workload import build, load_optimizer

Payload = tuple[RankOptions, str, str, Options, tuple[Way, ...], int]
T = TypeVar("T")
_EVALUATED = 500
_WARM_UP = 2
_SET_UP = 8
"""The last step in which sublayers, shapes and micro-batches are measured; memory counts from the next one on."""


def run_rank(place: Place, payload: Payload, report: Report) -> None:
    """Train in the given ways, one after the other. Reports text, and (way, record) when a way is done."""
    ranks, store, folder, options, ways, seed = payload
    with joined(ranks, place, store) as device:
        about = options, seed, device, Path(folder)
        # Does not count: the first way must not pay for the start of the machine.
        _with_job(ways[0], about, lambda job: [job.step(step) for step in range(_WARM_UP)])
        for way in ways:
            report((way.name, _with_job(way, about, lambda job: _train(job, report))))


def _with_job(way: Way, about: tuple[Options, int, torch.device, Path], use: Callable[["_Job"], T]) -> T:
    """What `use` gives for the job of a way, whose memory is free afterwards."""
    job = (_Ddp if way.stages == 0 else _Piped)(way, *about)
    try:
        return use(job)
    finally:
        job.close()
        del job
        gc.collect()


class _Job:
    """A model with its data, optimizer and learning rate; how a step runs is up to the way."""

    def __init__(self, way: Way, options: Options, seed: int, device: torch.device, folder: Path) -> None:
        self.memory = PeakMemory(device)
        self.way, self.options, self.device = way, options, device
        self.workload = build(options.model, options.data, seed=seed).to(device)
        (phase,) = self.workload.phases
        self.module = phase.module
        if (folder / "pretrained.pt").exists():
            load_pretrained(self.module, folder / "pretrained.pt")
        self.optimizer = load_optimizer(options.optimizer, self.module.parameters())
        self.sampler = Sampler(len(self.workload.train), batch=options.batch, seed=seed)
        total = options.epochs * self.sampler.batches
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: one_cycle(step, total))

    rank, frozen, stages, replicas = 0, 0, 1, 1
    """The replica of this rank, frozen blocks, and the shape."""
    cache: ActivationCache | None = None
    offer = ""
    """What was decided about the stages after the last freeze."""
    set_up_s = 0.0
    """Seconds to wrap or cut the model, with all measurements for that. Model and data were there."""

    def step(self, step: int) -> Tensor:
        """Train on one global batch; returns a loss, which is the last work that was issued."""
        raise NotImplementedError

    def end_epoch(self, epoch: int, train_s: float) -> dict[str, Any] | None:
        """Freeze and reshape as the way says, after an epoch of `train_s` seconds; facts of a reshape."""
        return None

    def correct(self, batch: tuple[Tensor, ...]) -> tuple[float, int]:
        """(right answers, answers) of all ranks for this rank's part of a test batch."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the way made."""

    def batch(self, indices: Tensor, epoch: int) -> tuple[Tensor, ...]:
        """Training samples on the device."""
        return tuple(part.to(self.device) for part in self.workload.train.batch(indices, epoch=epoch))

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()


class _Ddp(_Job):
    """torch's DDP: every rank has the whole model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replicas, self.rank = dist.get_world_size(), dist.get_rank()
        with timed(self.device) as took:
            self._model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
            if self.way.bf16:
                self._model.register_comm_hook(None, bf16_compress_hook)
        (self.set_up_s,) = took

    def step(self, step: int) -> Tensor:
        """A plain DDP step."""
        epoch, indices = self.sampler(step)
        mine = share(len(indices), self.rank, self.replicas)
        with arithmetic(self.options):
            loss: Tensor = self._model(*self.batch(indices[mine.start : mine.stop], epoch))
        loss.backward()
        self._update()
        return loss.detach()

    def correct(self, batch: tuple[Tensor, ...]) -> tuple[float, int]:
        """Score this rank's part, and add all ranks'."""
        assert self.workload.evaluate is not None
        with arithmetic(self.options):
            right, count = self.workload.evaluate(batch) if len(batch[0]) else (0.0, 0)
        sums = torch.tensor([right, count], device=self.device, dtype=torch.float64)
        dist.all_reduce(sums)
        return float(sums[0]), int(sums[1])


class _Piped(_Job):
    """A pipeline of the engine, with the switches of its way."""

    def __init__(self, way: Way, options: Options, seed: int, device: torch.device, folder: Path) -> None:
        super().__init__(way, options, seed, device, folder)
        with timed(device) as took:
            self._set_up(folder)
        (self.set_up_s,) = took

    def _set_up(self, folder: Path) -> None:
        way, options = self.way, self.options
        blocks = Blocks.of(self.module)
        if way.cache:
            self.cache = shared_cache(
                [sublayer.module for sublayer in blocks.cut()],
                samples=len(self.workload.train), gpu=options.gpu, ram=options.ram, disk=options.disk,
                folder=folder,
                epochs=options.epochs,
            )  # fmt: skip
        with arithmetic(options):
            times = measure_sublayers(blocks, self.batch(self.sampler(0)[1], 0))
        codec = options.compress or None
        self._pipe = Pipeline(
            blocks, self.optimizer, stages=way.stages, confirm=True, prefix=self.cache, compress=codec, times=times
        )
        self._freezer = Freezer(blocks, options.freeze) if way.freeze else None
        self._follow_shape()

    def _follow_shape(self) -> None:
        self.stages, self.replicas, self.rank = *astuple(self._pipe.shape), self._pipe.replica

    def step(self, step: int) -> Tensor:
        """A step of the pipeline; the cache reads the next batch meanwhile."""
        self._pipe.tune_shape()
        self._follow_shape()
        epoch, indices = self.sampler(step)
        mine = self._pipe.share(len(indices))
        ids = indices[mine.start : mine.stop]
        view = epoch if getattr(self.workload.train, "varies", True) else 0
        if self.cache is not None and (step + 1) % self.sampler.batches:
            ahead = self.sampler(step + 1)[1]
            self.cache.prefetch(ahead[mine.start : mine.stop], view)
        with arithmetic(self.options):
            batch, total = self.batch(ids, epoch), len(indices)
            loss = self._pipe.train_batch(batch, total=total, ids=ids, view=view)
        self._update()
        return loss

    def end_epoch(self, epoch: int, train_s: float) -> dict[str, Any] | None:
        """Freeze; with `pipe` balance the stages, and with `dp` use fewer of them and more replicas, if that pays."""
        self.offer = ""
        if self._freezer is None or (epoch + 1) % self.options.freeze_every:
            return None
        began, before = time.perf_counter(), self._pipe.layout
        was = self.frozen
        if self.cache is not None:
            self.cache.epochs = self.options.epochs - epoch - 1
        self.frozen = self._freezer.end_epoch()
        if self.frozen == was or not self.way.pipe:
            return None
        left = (self.options.epochs - epoch - 1) * self.sampler.batches
        step_s = train_s / self.sampler.batches
        offer = self._pipe.reshape_if_it_pays(steps_left=left, step_s=step_s, fewer=self.way.dp)
        self.offer = "" if offer is None else str(offer)
        if self._pipe.layout == before:
            return None
        self._follow_shape()
        made = {"epoch": epoch + 1, "frozen": self.frozen, "from": str(before.shape), "to": str(self._pipe.shape)}
        return made | {"cost_s": time.perf_counter() - began, "decision": self.offer}

    def correct(self, batch: tuple[Tensor, ...]) -> tuple[float, int]:
        """Score with the pipeline; every replica has its part."""
        with arithmetic(self.options):
            right, count, _ = self._pipe.evaluate(batch)
        return right, count

    def close(self) -> None:
        """Close pipeline and cache."""
        self._pipe.close()
        if self._freezer is not None:
            self._freezer.close()
        if self.cache is not None:
            self.cache.close()


def _train(job: _Job, report: Report) -> dict[str, Any]:
    """All epochs: seconds of training (with set-up, freezes and reshapes, without tests), accuracy, shape, cache."""
    options, epochs, reshapes = job.options, [], []
    seconds = job.set_up_s
    loss = torch.zeros(())
    for epoch in range(options.epochs):
        row: dict[str, Any] = {"frozen": job.frozen, "stages": job.stages, "replicas": job.replicas}
        with timed(job.device) as took:
            for step in range(epoch * job.sampler.batches, (epoch + 1) * job.sampler.batches):
                loss = job.step(step)
                if step == _SET_UP:
                    job.memory.restart()
        row |= {"train_s": took[0], "loss": float(loss), "accuracy": _accuracy(job)}
        if job.cache is not None:
            row["cache"] = {**vars(job.cache.stats), "why_off": job.cache.why_off}
        if epoch + 1 < options.epochs:
            with timed(job.device) as change:
                made = job.end_epoch(epoch, took[0])
            if made is not None:
                reshapes.append(made | {"at_s": seconds + took[0]})
            seconds += change[0]
            row |= {"change_s": change[0], "offer": job.offer}
        seconds += took[0]
        row["seconds"] = seconds
        epochs.append(row)
        accuracy = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.2%}"
        report(f"{job.way.name}: epoch {epoch + 1} of {options.epochs}, {took[0]:.2f} s{accuracy}")
    samples = job.sampler.batches * options.batch * options.epochs
    return {
        "epochs": epochs,
        "reshapes": reshapes,
        "seconds": seconds,
        "set_up_s": job.set_up_s,
        "samples_per_s": samples / seconds,
        "peak_memory_bytes": job.memory.peak(),
    }


@contextmanager
def timed(device: torch.device) -> Iterator[list[float]]:
    """Seconds of a block, from a barrier of all ranks to the next one."""
    took: list[float] = []
    dist.barrier()
    synchronise(device)
    began = time.perf_counter()
    yield took
    synchronise(device)
    dist.barrier()
    took.append(time.perf_counter() - began)


def _accuracy(job: _Job) -> float | None:
    """The share of right answers on the test set; every replica scores its part of each batch."""
    test = job.workload.test
    if test is None or not job.options.test_samples:
        return None
    right, counted = 0.0, 0
    for indices in torch.arange(min(job.options.test_samples, len(test))).split(_EVALUATED):
        mine = share(len(indices), job.rank, job.replicas)
        batch = tuple(part.to(job.device) for part in test.batch(indices[mine.start : mine.stop]))
        more, count = job.correct(batch)
        right, counted = right + more, counted + count
    return right / counted
