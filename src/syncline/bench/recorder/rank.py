"""One rank of `bench recorder`: the same training with the recorder on and off, in blocks of steps that alternate.

A second measurement alternates recorded and unrecorded steps within one recording. Neighbouring steps are alike, so it
has less noise from the machine than blocks have.
"""

import gc
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline.bench.training import BlockTimes, Options, Way, joined
from syncline.cluster.ranks import Place, Report
from syncline.trace.record.recorder import process_recorder
from syncline.trace.record.sampling import Sampling, sampling_interval
from syncline.trace.record.session import start

LEAD = {"cpu": 2, "cuda": 3}
"""Steps at the start of a block that do not count. On CUDA, the work in flight reaches its steady level in them."""
ALTERNATING_STEPS = 80
"""Steps per block of the measurement that alternates recorded and unrecorded steps."""
CYCLE = {"ddp": (2, 1, 0), "syncline": (12, 4, 1)}
"""Of that measurement: steps per cycle, how many of them are recorded, and how many steps after each change do not
count. For an attached model the recorder also works in the steps before and after a recorded one (six of twelve in
all), and exchanges reach into the next step."""
SAMPLED_S = {"cpu": 200.0, "cuda": 15.0}
"""Approximate seconds for which a way is trained with sampling and, in turn, without recording; at least two rounds."""


def run_rank(place: Place, payload: tuple[Options, str, str], report: Report) -> dict[str, Any]:
    """Train each way, first with every step recorded, then with the default sampling; plain records by way.

    The ways run one after the other, because an engine in the process makes every recording watch more steps.
    """
    options, store, folder = payload
    records, tensors = {}, 0
    with joined(options, place, store) as device:
        for name in options.ways:
            way = Way(name, options, device)
            way.warm_up(options.warm_up)
            report(f"{name}: warm")
            records[name] = _way(way, options, device, folder, report)
            tensors = len(way.parameters)
            if way.sync is not None:
                way.sync.close()
            dist.barrier()
    return {"ways": records, "tensors": tensors}


def trace_file(folder: str, way: str, number: int) -> Path:
    """Trace of a block in which every step is recorded."""
    return Path(folder) / f"{way}-{number}.json.gz"


def _way(way: Way, options: Options, device: torch.device, folder: str, report: Report) -> dict[str, Any]:
    kinds = ("on", "off", "sampled", "sampled_off")
    blocks = {kind: BlockTimes() for kind in kinds}
    every = 1
    for number in range(options.blocks):
        # The order alternates, so that a drift of the machine affects both alike.
        for kind in kinds[:2] if number % 2 else kinds[1::-1]:
            path = trace_file(folder, way.name, number) if kind == "on" else None
            _block(way, blocks[kind], options.steps, device, path)
            if path is not None and not number:
                every = _agreed(_default(way, blocks[kind], device), device)
        report(f"{way.name}: block {number + 1} of {options.blocks}")
    steps = max(options.steps, every)
    steps -= steps % every  # the same number of recorded steps in every block
    step_s = sum(blocks["off"].step) / len(blocks["off"].step) / 1e3
    fitting = int(SAMPLED_S[options.device] / (2 * steps * step_s))
    # With a single block, the run only has to be quick.
    rounds = _agreed(max(2, min(10 * options.blocks, fitting)) if options.blocks > 1 else 1, device)
    for number in range(rounds):
        for kind in kinds[2:] if number % 2 else kinds[:1:-1]:
            path = Path(folder) / f"{way.name}-sampled.json.gz" if kind == "sampled" else None
            _block(way, blocks[kind], steps, device, path, every=every)
        report(f"{way.name}: one step in {every}, block {number + 1} of {rounds}, {steps} steps each")
    report(f"{way.name}: recorded and unrecorded steps in turn")
    in_turn = _in_turn(way, options, device, Path(folder) / f"{way.name}-in-turn.json.gz")
    found = {kind: vars(one) for kind, one in blocks.items()}
    return found | {"every": every, "sampled_steps": steps, "in_turn": in_turn}


def _default(way: Way, recorded: BlockTimes, device: torch.device) -> int:
    """The sampling interval that the recorder would choose, from the recording that has just ended."""
    spans, steps = process_recorder(device, engine=False).counts()
    return sampling_interval(spans=spans / steps, step_ns=recorded.step[-1] * 1e6, engine=way.sync is not None)


def _agreed(number: int, device: torch.device) -> int:
    """The number of rank 0, on all ranks."""
    shared = torch.tensor([number], device=device)
    dist.broadcast(shared, 0)
    return int(shared.item())


def _block(
    way: Way, blocks: BlockTimes, steps: int, device: torch.device, path: Path | None, *, every: int = 1
) -> None:
    """Time steps without the recorder, from the end of one step to the end of another, as the recorder does."""
    gc.collect()
    recording = start(path, model=way.module, optimizer=way.optimizer, every=every) if path is not None else None
    dist.barrier()
    for _ in range(LEAD[device.type]):
        way.optimizer.zero_grad()
        way.forward_backward_step()
    _step_done(device)
    with blocks.block(steps):
        for _ in range(steps):
            way.optimizer.zero_grad()
            way.forward_backward_step()
        _step_done(device)
    way.optimizer.zero_grad()
    way.wait()
    if recording is not None:
        recording.stop()


class ConsecutiveSteps(Sampling):
    """Record several consecutive steps of each cycle."""

    def keeps(self, step: int) -> bool:
        """Whether a step is recorded."""
        return step % self.every < CYCLE["syncline"][1]


def _in_turn(way: Way, options: Options, device: torch.device, path: Path) -> dict[str, list[float]]:
    """Milliseconds of recorded and of unrecorded steps, one value per cycle."""
    recorder = process_recorder(device, engine=False)
    every, kept, left_out = CYCLE[way.name]
    cycles = max(2, ALTERNATING_STEPS * options.blocks // every)
    gc.collect()
    recording = start(path, model=way.module, optimizer=way.optimizer, every=every)
    if kept > 1:
        recording.use_sampling(ConsecutiveSteps(every))
    dist.barrier()
    moments, watched = [_moment(device)], []
    for _ in range((cycles + 2) * every):
        watched.append(recorder.enabled)
        way.optimizer.zero_grad()
        way.forward_backward_step()
        moments.append(_moment(device))
    way.optimizer.zero_grad()
    way.wait()
    recording.stop()
    found: dict[str, list[float]] = {"on": [], "off": []}
    cuts = [n for n in range(1, len(watched)) if watched[n] is not watched[n - 1]]
    # Runs of steps that are all recorded or all unrecorded. The first two are start-up, and the last one has no end.
    for first, end in pairwise(cuts[1:]):
        counted = end - first - left_out
        took = _apart_ms(moments[first + left_out], moments[end]) / counted
        found["on" if watched[first] else "off"].append(took)
    return {kind: values[:cycles] for kind, values in found.items()}


def _moment(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _apart_ms(begin: Any, end: Any) -> float:
    return float((end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end))


def _step_done(device: torch.device) -> None:
    """Wait for the current stream, where the recorder marks a step. Exchanges on other streams stay in flight."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
