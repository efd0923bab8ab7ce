"""The cost of the guard of codec errors: its CPU time in a training of two ranks, as a share of all CPU time.

    python scripts/guard_cost.py --out benchmarks/results/guard-cost-cpu.json

CPU seconds, because they hardly depend on what else the machine does. The guard works in the training thread (checks,
sums over the ranks) and in the threads that run launches (samples). Both are counted.
"""

import argparse
import json
import os
import tempfile
import time
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import syncline.plan.auto_spec
from syncline.bench.output import environment
from syncline.engine.launch.samples import LaunchSamples
from syncline.engine.tuning.codec_guard import EVERY, CodecGuard
from syncline.files import write_text
from syncline.plan import CodecCost, Costs, Errors, LinkCost
from syncline.plan.errors import CodecError
from syncline.train.workload import build


def counted(function: Any, spent: list[float]) -> Any:
    """The same function; its CPU seconds are added to a list."""

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        begin = time.thread_time()
        try:
            return function(*args, **given)
        finally:
            spent.append(time.thread_time() - begin)

    return call


def rank_main(rank: int, given: argparse.Namespace, folder: str) -> None:
    """Train with a fixed plan under a guard; rank 0 writes what it has cost."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", given.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=given.world)
    phase = build(given.model, given.data).phases[0]
    optimizer = torch.optim.SGD(phase.module.parameters(), lr=0.01)
    data = build(given.model, given.data).train
    sync = syncline.attach(phase.module, optimizer, compress=given.codec, tune=False)
    automatic = syncline.plan.auto_spec.parse_auto(f"auto({given.codec}, error=1000)")
    assert automatic is not None
    names = [shape.name for shape in sync.shapes]
    text = sync.plan.units[0].codec
    errors = Errors(dict.fromkeys(names, 1.0), {text: dict.fromkeys(names, CodecError(0.0, 0.0))})
    costs = Costs(given.world, 0.1, 0.1, {}, {}, LinkCost(1e-4, 1e8), {text: CodecCost()})
    guard = CodecGuard(sync, automatic)
    guard.planned(sync.plan, sync.shapes, costs, errors)
    spent: list[float] = []
    LaunchSamples.before, LaunchSamples.after = (
        counted(function, spent) for function in (LaunchSamples.before, LaunchSamples.after)
    )
    after_step = counted(guard.after_step, spent)
    begin = cpu = 0.0
    for step in range(given.warm_up + given.steps):
        if step == given.warm_up:
            sync.wait()
            spent.clear()
            begin, cpu = time.perf_counter(), time.process_time()
        indices = torch.randint(len(data), (given.batch,), generator=torch.Generator().manual_seed(step * 10 + rank))
        phase.module(*data.batch(indices)).backward()
        optimizer.step()
        assert after_step() is None
        optimizer.zero_grad()
    sync.wait()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
    read = sum(unit.energy is not None for unit in guard.rules.units.values())
    assert read, "the guard has read errors"
    sync.close()
    if rank == 0:
        row = {"share": sum(spent) / cpu, "guard_s": sum(spent), "cpu_s": cpu, "wall_s": wall, "units_read": read}
        print(json.dumps(row), flush=True)
        setting = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
        content = {
            "environment": environment(torch.device("cpu")),
            "setting": setting | {"every": EVERY},
            "rows": [row],
        }
        write_text(json.dumps(content, indent=1) + "\n", given.out)
    dist.destroy_process_group()


def main() -> None:
    """Run two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vgg11(width=0.5)")
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2 * EVERY)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(partial(rank_main, given=given, folder=folder), nprocs=given.world)


if __name__ == "__main__":
    main()
