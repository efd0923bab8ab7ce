"""Processor time that the thread of `SYNCLINE_WATCH=1` takes, as a share of training time.

    python scripts/watch_cost.py --out benchmarks/results/watch-cost-cpu.json

One comparison of recorded steps: packing and sending them on a rank, and on rank 0 receiving and comparing those of all
ranks. Cases have more steps than the recorder samples in ten seconds: DDP (12 spans per step), an attached ResNet-50
(188 spans). Thread time, the median of several comparisons, so that other programs do not count.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.bench.output import environment, write_json
from syncline.trace import Recorder
from syncline.trace.record import straggler_watch
from syncline.trace.span import STEP

PERIOD_S = straggler_watch.PERIOD_S
REPEATS, MS = 9, 1_000_000
CASES = [(way, ranks) for way in ("ddp", "attached") for ranks in (2, 8, 64)]
STEPS_AND_SPANS = {"ddp": (30, 12), "attached": (12, 188)}


def recorded(rank: int, steps: int, spans: int) -> Recorder:
    """A recorder with that many steps of 100 ms; the last rank joins late."""
    recorder = Recorder(rank=rank)
    for step in range(steps):
        recorder.step, begin = step, 100 * MS * step
        for number in range(spans - 4):
            start = begin + number * MS // 10 + rank * MS
            recorder.add("exchange", "allreduce", start, begin + 90 * MS, unit=f"layer{number}.weight", step=step)
        for lane in ("data", "forward", "backward", "update"):
            recorder.add(lane, lane, begin, begin + 10 * MS, step=step)
        recorder.add(STEP, STEP, begin, begin + 100 * MS, step=step)
    recorder.step = steps + 1
    return recorder


def comparison(ranks: int, steps: int, spans: int) -> tuple[float, float]:
    """Milliseconds of thread time on rank 0, and on another rank."""
    store, took = dist.HashStore(), {}
    for rank in (*range(1, ranks), 0):
        watch = straggler_watch.StragglerWatch(store, recorded(rank, steps, spans), rank=rank, world=ranks)
        begin = time.thread_time()
        watch.compare_now()
        took[rank] = 1e3 * (time.thread_time() - begin)
        watch.close()
    return took[0], took[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    straggler_watch.PERIOD_S = 1e6  # its own thread does nothing meanwhile
    rows = []
    for way, ranks in CASES:
        found = [comparison(ranks, *STEPS_AND_SPANS[way]) for _ in range(REPEATS)]
        first, other = (statistics.median(of) for of in zip(*found, strict=True))
        spread = [min(of[0] for of in found), max(of[0] for of in found)]
        steps, spans = STEPS_AND_SPANS[way]
        period_s = PERIOD_S * max(1, ranks / 32)
        rows.append(
            {
                "way": way, "ranks": ranks, "steps": steps, "spans_per_step": spans, "rank_0_ms": first,
                "rank_0_ms_range": spread, "other_rank_ms": other, "share_of_time": first / 1e3 / period_s,
            }
        )  # fmt: skip
        print(f"{way:9} {ranks:3} ranks: rank 0 {first:6.2f} ms, others {other:5.2f} ms: {first / 10 / period_s:.3f}%")
    if given.out:
        facts = {"environment": environment(torch.device("cpu")), "command": "python scripts/watch_cost.py"}
        write_json({**facts, "period_s": PERIOD_S, "repetitions": REPEATS, "rows": rows}, given.out)
