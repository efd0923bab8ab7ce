"""The first steps of a job, with all that tuning costs: DDP and attached models, each from its first step.

Every round starts new processes, since a process that has planned once plans faster. In a second start of the round
attached models find the plans of the first one in the plan cache. DDP runs in both, as the reference.
"""

import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from syncline.bench.ranks import Progress, ranks_started
from syncline.bench.timing import ratios, summarize
from syncline.bench.training import Options, Way, joined
from syncline.cluster.ranks import Place, Report

STEPS = 30
"""Steps that are counted. `DistributedDataParallel(...)` and `attach(...)` before them are timed as `connect`."""
WAYS = ("ddp", "syncline", "syncline(auto)")
_WARM_UP = 3
"""Steps of a model of its own, before anything is timed."""


def run_rank(place: Place, payload: tuple[Options, str, str], report: Report) -> dict[str, Any]:
    """Train every way for its first steps: seconds of wall and CPU time, and what an attached one says of its tuning.

    `options.plan_cache` is a folder that both starts of a round share.
    """
    options, store, _ = payload
    found: dict[str, Any] = {}
    with joined(options, place, store) as device:
        alone = Way("alone", options, device)
        for _ in range(_WARM_UP):  # libraries prepare themselves in the first steps of a process
            alone.step()
        del alone
        for name in options.ways:
            way = Way(name, options, device, plan_cache=options.plan_cache, connected=False)
            gc.collect()
            dist.barrier()
            begin = time.perf_counter()
            way.connect()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                way.step()
            way.wait()
            dist.barrier()
            found[name] = {
                "wall": time.perf_counter() - wall,
                "cpu": time.process_time() - cpu,
                "connect": wall - begin,
            }
            if way.sync is not None:
                tuning = way.sync.auto.report
                # Looking for the plan of an earlier run is a part of tuning, and happens in `attach`.
                found[name]["wall"] += tuning.recall
                found[name] |= {"tuning": str(tuning), "plan": way.sync.plan.executor}
            way.close()
            del way
            report(f"{name}: {found[name]['wall']:.1f} s for {options.steps} steps")
    return found


def measure(options: Options, *, rounds: int, progress: Progress) -> tuple[list[dict[str, Any]], float]:
    """Rows for new jobs and for second runs, with ratios to DDP and seconds; and how busy the machine was before."""
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    busiest = 0.0
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="syncline-plans-") as folder:
            for cached in (False, True):
                # The order alternates, so that a drift of the machine affects all alike.
                ways = options.ways if number % 2 == 0 else tuple(reversed(options.ways))
                asked = replace(options, ways=ways, plan_cache=str(Path(folder)))
                progress(f"first steps, round {number + 1} of {rounds}, {'second run' if cached else 'new job'}")
                with ranks_started(run_rank, asked, progress) as (records, _, busy):
                    runs[cached] += records
                busiest = max(busiest, busy)
    rows = [_row(name, cached, runs[cached]) for cached in runs for name in options.ways if name != "ddp"]
    return rows, busiest


def _row(name: str, cached: bool, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {"way": name, "cached": cached}
    for kind in ("wall", "cpu", "connect"):
        mine, ddp = ([record[way][kind] for record in records] for way in (name, "ddp"))
        made[kind] = summarize(ratios(mine, ddp))
        made[f"{kind}_s"], made[f"ddp_{kind}_s"] = mine, ddp
    return made | {"tuning": [record[name]["tuning"] for record in records]}
