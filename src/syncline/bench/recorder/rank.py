"""One rank of `bench recorder`: the same training with the recorder on and off, in blocks of steps that take turns.

And within one recording of some steps: neighbours are alike, so recorded and other steps tell less of the machine and
more of the recorder than blocks do.
"""

import gc
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline.bench.overhead.rank import SETTLED, Setting, Way, joined
from syncline.cluster.ranks import Place, Report
from syncline.trace.record.recorder import process_recorder
from syncline.trace.record.sampling import Sampling, sampling_interval
from syncline.trace.record.session import start

LEAD = {"cpu": 2, "cuda": 3}
"""Steps of a block that do not count. On CUDA, what an attached model leaves in flight is then as it will be."""
IN_TURN = 80
"""Steps for each block, in which some are recorded and others are not."""
CYCLE = {"ddp": (2, 1, 0), "syncline": (12, 4, 1)}
"""There: of so many steps so many are recorded, and how many of a row do not count. An attached model is watched in the
steps before and behind, too, six of twelve, and its exchanges reach into the next step."""
SAMPLED_S = {"cpu": 200.0, "cuda": 15.0}
"""About how long a way is trained with sampling and, in turn, without recording; two rounds at the least."""


@dataclass
class Blocks:
    """Milliseconds a step, a value a block: on the wall, of the process's CPUs, of the training thread's."""

    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)


def run_rank(place: Place, payload: tuple[Setting, str, str], report: Report) -> dict[str, Any]:
    """Train each way, first with every step recorded and then with as few as by default; plain records by way.

    One way after the other: an engine in the process makes every recording watch more steps.
    """
    setting, store, folder = payload
    records, tensors = {}, 0
    with joined(setting, place, store) as device:
        for name in setting.ways:
            way = Way(name, setting, device)
            for _ in range(max(setting.warm_up, SETTLED if way.sync is not None else 0)):
                way.step()
            way.settle()
            report(f"{name}: warm")
            records[name] = _way(way, setting, device, folder, report)
            tensors = len(way.parameters)
            if way.sync is not None:
                way.sync.close()
            dist.barrier()
    return {"ways": records, "tensors": tensors}


def trace_file(folder: str, way: str, number: int) -> Path:
    """Where the trace of a way's block lies in which every step was recorded."""
    return Path(folder) / f"{way}-{number}.json.gz"


def _way(way: Way, setting: Setting, device: torch.device, folder: str, report: Report) -> dict[str, Any]:
    kinds = ("on", "off", "sampled", "sampled_off")
    blocks = {kind: Blocks() for kind in kinds}
    every = 1
    for number in range(setting.blocks):
        # In turn, so that a drift of the machine is nobody's.
        for kind in kinds[:2] if number % 2 else kinds[1::-1]:
            path = trace_file(folder, way.name, number) if kind == "on" else None
            _block(way, blocks[kind], setting.steps, device, path)
            if path is not None and not number:
                every = _agreed(_default(way, blocks[kind], device), device)
        report(f"{way.name}: block {number + 1} of {setting.blocks}")
    steps = max(setting.steps, every)
    steps -= steps % every  # else there were more recorded steps in some blocks than in others
    step_s = sum(blocks["off"].step) / len(blocks["off"].step) / 1e3
    fitting = int(SAMPLED_S[setting.device] / (2 * steps * step_s))
    rounds = _agreed(max(min(2, setting.blocks), min(10 * setting.blocks, fitting)), device)
    for number in range(rounds):
        for kind in kinds[2:] if number % 2 else kinds[:1:-1]:
            path = Path(folder) / f"{way.name}-sampled.json.gz" if kind == "sampled" else None
            _block(way, blocks[kind], steps, device, path, every=every)
        report(f"{way.name}: each {every}. step, block {number + 1} of {rounds}, of {steps} steps")
    report(f"{way.name}: recorded and other steps in turn")
    in_turn = _in_turn(way, setting, device, Path(folder) / f"{way.name}-in-turn.json.gz")
    found = {kind: vars(one) for kind, one in blocks.items()}
    return found | {"every": every, "sampled_steps": steps, "in_turn": in_turn}


def _default(way: Way, recorded: Blocks, device: torch.device) -> int:
    """What the recorder itself would choose, by the recording that has just ended."""
    spans, steps = process_recorder(device, engine=False).counts()
    return sampling_interval(spans=spans / steps, step_ns=recorded.step[-1] * 1e6, engine=way.sync is not None)


def _agreed(number: int, device: torch.device) -> int:
    """Rank 0's number."""
    told = torch.tensor([number], device=device)
    dist.broadcast(told, 0)
    return int(told.item())


def _block(way: Way, blocks: Blocks, steps: int, device: torch.device, path: Path | None, *, every: int = 1) -> None:
    """From the end of a step to the end of another: what the recorder calls steps, timed without it."""
    gc.collect()
    recording = start(path, model=way.module, optimizer=way.optimizer, every=every) if path is not None else None
    dist.barrier()
    for _ in range(LEAD[device.type]):
        way.optimizer.zero_grad()
        way.until_stepped()
    _step_done(device)
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(steps):
        way.optimizer.zero_grad()
        way.until_stepped()
    _step_done(device)
    blocks.step.append((time.perf_counter() - wall) * 1e3 / steps)
    blocks.cpu.append((time.process_time() - cpu) * 1e3 / steps)
    blocks.thread.append((time.thread_time() - thread) * 1e3 / steps)
    way.optimizer.zero_grad()
    way.settle()
    if recording is not None:
        recording.stop()


class Rows(Sampling):
    """Several steps in a row of each cycle."""

    def keeps(self, step: int) -> bool:
        """Whether a step is one of them."""
        return step % self.every < CYCLE["syncline"][1]


def _in_turn(way: Way, setting: Setting, device: torch.device, path: Path) -> dict[str, list[float]]:
    """Milliseconds of a step while it was watched and while it was not, a value each cycle."""
    recorder = process_recorder(device, engine=False)
    every, kept, left_out = CYCLE[way.name]
    cycles = max(2, IN_TURN * setting.blocks // every)
    gc.collect()
    recording = start(path, model=way.module, optimizer=way.optimizer, every=every)
    if kept > 1:
        recording.use_sampling(Rows(every))
    dist.barrier()
    moments, watched = [_moment(device)], []
    for _ in range((cycles + 2) * every):
        watched.append(recorder.enabled)
        way.optimizer.zero_grad()
        way.until_stepped()
        moments.append(_moment(device))
    way.optimizer.zero_grad()
    way.settle()
    recording.stop()
    found: dict[str, list[float]] = {"on": [], "off": []}
    # The first rows are start-up, and the last one has no end.
    for first, end in _rows(watched)[2:-1]:
        counted = end - first - left_out
        took = _apart_ms(moments[first + left_out], moments[end]) / counted
        found["on" if watched[first] else "off"].append(took)
    return {kind: values[:cycles] for kind, values in found.items()}


def _rows(watched: list[bool]) -> list[tuple[int, int]]:
    """Where rows of equal steps begin and end."""
    cuts = [n for n in range(1, len(watched)) if watched[n] is not watched[n - 1]]
    return list(pairwise([0, *cuts, len(watched)]))


def _moment(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _apart_ms(begin: Any, end: Any) -> float:
    return float((end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end))


def _step_done(device: torch.device) -> None:
    """Where the recorder's mark of a step lies: an attached model has exchanges in flight on other streams there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
