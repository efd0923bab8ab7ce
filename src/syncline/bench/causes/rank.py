"""Ranks of `bench causes`: train with the cause and without it in the same process, and record both."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline.bench.causes.cases import Case
from syncline.bench.causes.loops import Injection, Loop, batches, build_loop
from syncline.bench.training import Options, joined, synchronise
from syncline.cluster.ranks import Place, Report
from syncline.engine.tuning.tuner import TUNED
from syncline.trace.record.session import recording

_WARM_UP = {"attach": TUNED}
_MORE_WARM_UP = 12  # DDP's own log synchronises the device in its first ten passes
_PROFILER_WARM_UP = 2
_WORKER = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(20000))"


def run_rank(place: Place, payload: tuple[Case, str, str], report: Report) -> dict[str, Any]:
    """Record `without` and `with`, each into a folder of this name; returns how often the cause acted in both."""
    case, store, folder = payload
    options = Options(device=case.device, ways=(), ranks=case.ranks, timeout_s=60.0)
    with joined(options, place, store) as device:
        injection = Injection(case, place.rank)
        plain = build_loop(case, injection, device, split=False)
        # Where the cause is in the loop's set-up, there are two loops.
        slow = build_loop(case, injection, device, split=True) if case.cause == "small buckets" else plain
        source = batches(injection, device)
        for loop in {id(plain): plain, id(slow): slow}.values():
            for _ in range(_WARM_UP.get(case.loop, 0) + _MORE_WARM_UP):
                loop.step(next(source))
        fired = {}
        # Neither is always first: a machine may get busier while a case runs.
        for way in ("with", "without") if case.seed % 2 else ("without", "with"):
            _switch(case, injection, way, place, Path(folder), report)
            before = injection.fired
            with _busy_workers(case.workers if injection.on and place.rank == 0 else 0):
                _record(case, slow if injection.on else plain, source, device, Path(folder) / way)
            fired[way] = injection.fired - before
    return fired


def _switch(case: Case, injection: Injection, way: str, place: Place, folder: Path, report: Report) -> None:
    """Turn the cause on or off on this rank; the caller of the ranks changes the links and says when that is done."""
    injection.on = way == "with"
    if case.bandwidth:
        if place.rank == 0:
            report(way)
        while not (folder / f"{way}.done").exists():
            time.sleep(0.01)
    dist.barrier()


@contextmanager
def _busy_workers(count: int) -> Iterator[None]:
    """Processes that need a core each; they end with this block, or with this process."""
    with ExitStack() as stack:
        for _ in range(count):
            worker = subprocess.Popen([sys.executable, "-S", "-c", _WORKER])  # noqa: S603 - our own code
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        yield


def _record(case: Case, loop: Loop, source: Any, device: torch.device, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if device.type == "cuda":
        _profile(case, lambda: loop.step(next(source)), folder / f"rank{dist.get_rank()}.json.gz")
        return
    told = (loop.models, loop.optimizers) if case.told else (None, None)
    with recording(*told, path=folder / "trace.json.gz", every=1) as running:
        loader = running.data(source)
        for _, batch in zip(range(case.steps), loader, strict=False):
            loop.step(batch)


def _profile(case: Case, step: Callable[[], None], path: Path) -> None:
    """Record with torch's profiler: only it sees kernels and the host's calls."""
    from torch.profiler import ProfilerActivity, profile, schedule

    synchronise(torch.device("cuda"))
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=_PROFILER_WARM_UP, active=case.steps),
        on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(_PROFILER_WARM_UP + case.steps):
            step()
            profiler.step()
