"""One rank of `bench recorder`: the same training with the recorder on and off, in blocks of steps that take turns."""

import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline.bench.overhead_rank import Setting, Way, joined, synchronise
from syncline.cluster.launch import Place, Report
from syncline.trace.recording import start

LEAD = {"cpu": 1, "cuda": 3}
"""Steps of a block that do not count. On CUDA, what an attached model leaves in flight is then as it will be."""
SETTLED = 18
"""Steps after which an attached model has its plan, and has looked at the link."""


@dataclass
class Blocks:
    """Milliseconds a step, a value a block: on the wall, of the process's CPUs, of the training thread's."""

    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)


def run_rank(place: Place, payload: tuple[Setting, str, str], report: Report) -> dict[str, Any]:
    """Train each way with the recorder on and off; returns plain records by way, `on` and `off`."""
    setting, store, folder = payload
    with joined(setting, place, store) as device:
        ways = []
        for name in setting.ways:
            way = Way(name, setting, device)
            for _ in range(max(setting.warm_up, SETTLED if way.sync is not None else 0)):
                way.step()
            way.settle()
            ways.append(way)
            report(f"{name}: warm")
        records = {way.name: {"on": Blocks(), "off": Blocks()} for way in ways}
        for number in range(setting.blocks):
            for way in ways:
                # In turn, so that a drift of the machine is nobody's.
                for on in (True, False) if number % 2 else (False, True):
                    path = trace_file(folder, way.name, number) if on else None
                    _block(way, records[way.name]["on" if on else "off"], setting.steps, device, path)
            report(f"block {number + 1} of {setting.blocks}")
        for way in ways:
            if way.sync is not None:
                way.sync.close()
        dist.barrier()
        tensors = len(ways[0].parameters)
    plain = {name: {kind: vars(blocks) for kind, blocks in both.items()} for name, both in records.items()}
    return {"ways": plain, "tensors": tensors}


def trace_file(folder: str, way: str, number: int) -> Path:
    """Where the trace of a way's block lies."""
    return Path(folder) / f"{way}-{number}.json.gz"


def _block(way: Way, blocks: Blocks, steps: int, device: torch.device, path: Path | None) -> None:
    """From the end of a step to the end of another: what the recorder calls steps, timed without it."""
    gc.collect()
    recording = start(path, model=way.module, optimizer=way.optimizer) if path is not None else None
    dist.barrier()
    for _ in range(LEAD[device.type]):
        way.optimizer.zero_grad()
        way.until_stepped()
    synchronise(device)
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(steps):
        way.optimizer.zero_grad()
        way.until_stepped()
    synchronise(device)
    blocks.step.append((time.perf_counter() - wall) * 1e3 / steps)
    blocks.cpu.append((time.process_time() - cpu) * 1e3 / steps)
    blocks.thread.append((time.thread_time() - thread) * 1e3 / steps)
    way.optimizer.zero_grad()
    way.settle()
    if recording is not None:
        recording.stop()
