"""Made-up traces for the page's tests: steps of several ranks with layers, buckets, waits, codecs."""

import random
from pathlib import Path
from typing import Any

from syncline.trace import Span, Trace
from syncline.trace.formats.chrome_write import write_chrome_trace

MS = 1_000_000


def spans(
    *, ranks: int = 2, steps: int = 4, units: int = 6, late: int = 1, names: list[str] | None = None, seed: int = 0
) -> list[Span]:
    """Steps of forward, backward with an exchange a unit behind it, update; rank `late` computes longest."""
    noise = random.Random(seed)
    units_of = names or [f"layers.{i}.weight" for i in range(units)]
    found = []
    clocks = dict.fromkeys(range(ranks), 0)
    for step in range(steps):
        joined: dict[str, list[tuple[int, int]]] = {name: [] for name in units_of}
        begun = dict(clocks)
        for rank in range(ranks):
            at = clocks[rank]
            slow = 1.4 if rank == late else 1.0
            at = _do(found, rank, "data", "load", "", step, at, int(0.4 * MS))
            for name in units_of:
                at = _do(
                    found, rank, "forward", "module", name, step, at, int(0.2 * MS * slow * noise.uniform(0.8, 1.2))
                )
            for name in reversed(units_of):
                at = _do(
                    found, rank, "backward", "module", name, step, at, int(0.5 * MS * slow * noise.uniform(0.8, 1.2))
                )
                _do(found, rank, "encode", "bf16", name, step, at, int(0.05 * MS))
                joined[name].append((rank, at + int(0.05 * MS)))
            clocks[rank] = at
        free = 0
        for number, name in enumerate(reversed(units_of)):
            begin = max(free, *(time for _, time in joined[name]))
            free = end = begin + int(0.7 * MS)
            for rank, time in joined[name]:
                if begin > time:
                    found.append(Span(rank, "wait", "all-reduce", name, step, time, begin))
                found.append(Span(rank, "exchange", "all-reduce", name, step, begin, end, 40_000 * (number + 1)))
                _do(found, rank, "decode", "bf16", name, step, end, int(0.04 * MS))
                clocks[rank] = max(clocks[rank], end + int(0.04 * MS))
        for rank in range(ranks):
            end = _do(found, rank, "update", "sgd", "", step, clocks[rank], int(0.6 * MS))
            found.append(Span(rank, "step", "step", "", step, begun[rank], end))
            clocks[rank] = end + int(0.05 * MS)
    return found


def many(count: int = 100_000, *, ranks: int = 4) -> list[Span]:
    """Exactly so many spans: steps of 60 units on four ranks."""
    one = len(spans(ranks=ranks, steps=1, units=60))
    made = spans(ranks=ranks, steps=-(-count // one) + 1, units=60)
    return sorted(made, key=lambda span: span.end)[:count]


def write(folder: Path, strategy: str, made: list[Span], *, world: int = 4, **metadata: Any) -> Path:
    """The trace of one strategy in a run folder."""
    file = folder / "runs" / strategy.replace("(", "-").replace(")", "") / "trace.json.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {"strategy": strategy, "world_size": world, "backend": "gloo", "clock_error_ns": 0} | metadata
    write_chrome_trace(Trace.of(made, metadata=facts, split=False), file)
    return file


def _do(found: list[Span], rank: int, lane: str, name: str, unit: str, step: int, at: int, length: int) -> int:
    found.append(Span(rank, lane, name, unit, step, at, at + length))
    return at + length
