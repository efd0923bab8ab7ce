"""One rank of `bench overhead`: the same model trained in several ways, in blocks of steps that alternate."""

import gc
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._compat.tensors import NoSubclasses
from syncline.bench.timing import Clock
from syncline.bench.training import BlockTimes, Options, Way, joined, synchronise
from syncline.cluster.ranks import Place, Report
from syncline.stats import mean, median

PHASES = ("forward", "backward", "step", "zero_grad")
# Number of tensors of a model: with fewer of them trained, the comparison would be wrong.
TENSORS = {"resnet50": 161}
_MEMORY_STEPS = 3
"""Steps in which memory is measured."""


@dataclass
class Record(BlockTimes):
    """Measurements of one way on one rank: milliseconds per step, one value per block; bytes."""

    phases: list[list[float]] = field(default_factory=list)
    issue: list[float] = field(default_factory=list)
    issue_phases: list[list[float]] = field(default_factory=list)
    kept_busy: list[bool] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    loss: float = math.nan
    plan: dict[str, int | str] = field(default_factory=dict)


def run_rank(place: Place, payload: tuple[Options, str, str], report: Report) -> dict[str, Any]:
    """Build all ways and measure them in turn; plain records by way."""
    options, store, _ = payload
    with joined(options, place, store) as device:
        Way("alone", options, device).step()  # libraries allocate some memory once: do not count it
        ways: list[Way] = []
        records = {name: Record() for name in options.ways}
        for name in options.ways:
            began = time.perf_counter()
            base = _held(device) if options.memory else 0
            way = Way(name, options, device)
            expected = TENSORS.get(options.model.partition("(")[0], len(way.parameters))
            assert len(way.parameters) == expected, f"{options.model} has {len(way.parameters)} tensors, not {expected}"
            way.warm_up(options.warm_up)
            if device.type == "cuda":
                _collect_for_good()
            if options.memory:
                records[name].memory = _memory(way, device, base)
            ways.append(way)
            report(f"{name}: warm in {time.perf_counter() - began:.1f} s")
        _collect_for_good()
        began = time.perf_counter()
        for block in range(options.blocks):
            for way in ways if block % 2 == 0 else reversed(ways):  # who runs after whom must not matter
                _block(way, records[way.name], options.steps, device)
            times = ", ".join(f"{way.name} {records[way.name].step[-1]:.1f}" for way in ways)
            report(f"block {block + 1} of {options.blocks}, ms per step: {times}")
            if block > 0 and _any_rank(time.perf_counter() - began > options.seconds, device):
                break
        if device.type == "cuda":
            clock, began = Clock(device), time.perf_counter()
            for number in range(options.issue_steps):
                for way in ways:
                    _issue(way, records[way.name], clock)
                if number > 1 and _any_rank(time.perf_counter() - began > options.seconds, device):
                    break
        for way in ways:
            records[way.name].loss = float(way.loss.detach())
            if way.sync is not None:
                plan: Any = way.sync.plan
                codecs = ", ".join(sorted({unit.codec for unit in plan.units}))
                facts = {"units": len(plan.units), "launches": len(plan.order)}
                captured = {"capture": plan.about["capture"]} if "capture" in plan.about else {}
                records[way.name].plan = {**facts, "executor": plan.executor, "codecs": codecs, **captured}
                way.close()
        gc.unfreeze()
        dist.barrier()
        gradient = sum(p.nbytes for p in ways[0].parameters)
        values = {name: vars(record) for name, record in records.items()}
        return {"ways": values, "tensors": len(ways[0].parameters), "gradient_bytes": gradient}


def _collect_for_good() -> None:
    """Let later garbage collections leave out what exists now: looking at all models takes half a second."""
    gc.collect()
    gc.freeze()


def _any_rank(here: bool, device: torch.device) -> bool:
    """Whether this is true on any rank."""
    flag = torch.tensor(float(here), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _block(way: Way, record: Record, steps: int, device: torch.device) -> None:
    """Time consecutive steps, from a barrier to the end of the last update."""
    gc.collect()
    dist.barrier()
    synchronise(device)
    with record.block(steps):
        phases = [way.step() for _ in range(steps)]
        way.wait()
    record.phases.append([mean(column) for column in zip(*phases, strict=True)])


def _issue(way: Way, record: Record, clock: Clock) -> None:
    """Time that the host needs to issue a step that follows another one, while the device has other work."""
    way.wait()
    first = clock.mark()
    clock.keep_busy()
    filler_ms = max(0.1, clock.between(first, clock.mark()))
    host = median([sum(phases) for phases in record.phases])
    dist.barrier()
    way.step()
    for _ in range(math.ceil(1.5 * host / filler_ms)):
        clock.keep_busy()
    end = clock.mark()
    phases = way.step()
    record.kept_busy.append(not end.query())
    record.issue.append(sum(phases))
    record.issue_phases.append(phases)
    way.wait()


def _memory(way: Way, device: torch.device, base: int) -> dict[str, float]:
    """Bytes of a way: right after `step()`, when nothing is in flight any more, and at the peak."""
    after_step, after_wait = [], []
    way.wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_MEMORY_STEPS):
        gc.collect()
        way.forward_backward_step()
        after_step.append(_held(device) - base)
        way.wait()
        after_wait.append(_held(device) - base)
        way.optimizer.zero_grad()
    found = {"after_step": median(after_step), "after_wait": median(after_wait)}
    if device.type == "cuda":
        way.wait()
        found["peak"] = torch.cuda.max_memory_allocated(device) - base
    return found | {"state": way.state_bytes()}


def _held(device: torch.device) -> int:
    """Bytes allocated on CUDA; on the CPU, the bytes of all tensors that Python knows."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages: dict[int, int] = {}
    with NoSubclasses():  # count a tensor in flight without waiting for it
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and thing.device.type == "cpu" and thing.layout is torch.strided:
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
