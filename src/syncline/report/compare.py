"""Figures derived from results: speed-up, efficiency, loss differences, bytes against theory, spread of ranks.

Pure functions of a results dict. A figure that cannot be computed (the run crashed, or there is no baseline) is None.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from syncline import stats
from syncline.results.file import finite, numbers, ok
from syncline.results.schema import Results, Run
from syncline.trace.span import PHASES

BASELINE = "single"
"""The strategy others are measured against: one rank, no exchange."""
_MOST_EFFICIENT = 1.1
_LATE, _FEWEST = 0.25, 10
"""The share of the steps, and their least number, whose losses say how well a run trains."""
_CLEARLY_WORSE = 1.2
"""Smaller ratios of late losses are also seen between equal runs, which differ in rounding."""


@dataclass(frozen=True)
class Behind:
    """A run whose loss is clearly above that of another one, which saw the same batches and sent all gradients."""

    label: str
    """The other run."""
    ratio: float
    """Mean loss of the last steps, relative to the other one's; infinite if one of them is not a finite number."""
    steps: int


@dataclass(frozen=True)
class Nearest:
    """The other run whose losses are closest, and the largest difference at any step."""

    label: str
    difference: float


@dataclass(frozen=True)
class Row:
    """One run with its derived figures."""

    label: str
    run: Run
    ok: bool
    median: float | None
    interval: tuple[float, float] | None
    speedup: float | None
    efficiency: float | None
    superlinear: bool
    """Whether the speed-up exceeds the growth in ranks so far that an efficiency would mean nothing."""
    against: str | None
    wire_ratio: float | None
    final_loss: float | None
    loss_difference: float | None
    nearest: Nearest | None
    behind: Behind | None
    """None where the loss is about that of the run with the most bytes, or cannot be compared."""
    rank_spread: float | None
    late_rank: int | None
    waited_ms: float | None


def rows(results: Results) -> list[Row]:
    """One row per run, in the order of the file."""
    runs = results["runs"]
    names = labels(runs)
    return [_row(run, name, runs, names) for run, name in zip(runs, names, strict=True)]


def labels(runs: Sequence[Run]) -> list[str]:
    """A unique name for each run: its spec, followed by `xN` if that spec ran at several world sizes."""
    sizes = Counter(strategy for strategy, _ in {(run["strategy"], run.get("world_size", 0)) for run in runs})
    plain = [
        run["strategy"] + (f" x{run['world_size']}" if sizes[run["strategy"]] > 1 and "world_size" in run else "")
        for run in runs
    ]
    total = Counter(plain)
    return [
        f"{name} #{plain[: place + 1].count(name)}" if total[name] > 1 else name for place, name in enumerate(plain)
    ]


def workers(run: Run) -> int:
    """Ranks that compute gradients: `world_size`, without dedicated servers."""
    return run.get("world_size", 1)


def step_median(run: Run) -> float | None:
    """The median step in ms, without the first step."""
    return finite(run.get("step_ms", {}).get("median"))


def steady(run: Run) -> list[float]:
    """All step times except the first."""
    return numbers(run.get("step_ms_series", [])[1:])


def parts_ms(run: Run) -> dict[str, float]:
    """Milliseconds of each part: its share of the median step."""
    middle = step_median(run) or 0.0
    return {part: share(run, part) * middle for part in PHASES}


def share(run: Run, part: str) -> float:
    """One part's share of the step; 0 when it was not measured."""
    return finite(run.get("breakdown", {}).get(part)) or 0.0


def baseline(run: Run, runs: Sequence[Run]) -> Run | None:
    """The run to compare `run` with: `single`, or else the same strategy at its smallest world size."""
    single = next((r for r in runs if r["strategy"] == BASELINE and ok(r)), None)
    if single is not None:
        return single
    family = [r for r in runs if r["strategy"] == run["strategy"] and ok(r)]
    smallest = min(family, key=workers, default=None)
    if smallest is None or len({workers(r) for r in family}) < 2:
        return None
    return smallest


def speedup(run: Run, base: Run | None) -> float | None:
    """Samples per second divided by those of the baseline."""
    if base is None or not ok(run):
        return None
    ours, theirs = finite(run.get("samples_per_s")), finite(base.get("samples_per_s"))
    return ours / theirs if ours is not None and theirs else None


def efficiency(run: Run, base: Run | None) -> float | None:
    """Speed-up divided by the growth in ranks: 1 is perfect scaling."""
    ratio = speedup(run, base)
    return None if ratio is None or base is None else ratio * workers(base) / workers(run)


def loss_difference(one: Run, other: Run) -> float | None:
    """The largest difference of two loss curves at the same step; None if the batches differ."""
    if one.get("batch") != other.get("batch"):
        return None
    pairs = [(finite(a), finite(b)) for a, b in zip(one.get("loss", []), other.get("loss", []), strict=False)]
    gaps = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    return max(gaps, default=None)


def wire_ratio(run: Run) -> float | None:
    """Measured bytes divided by the bytes of the formula; None if they were not measured."""
    wire = run.get("wire", {})
    theory, bytes_ = finite(wire.get("theory_bytes")), finite(run.get("wire_bytes_per_step"))
    return bytes_ / theory if wire.get("measured") and theory and bytes_ is not None else None


def rank_spread(run: Run) -> float | None:
    """How much longer the slowest rank's median step is than the fastest's: 0.1 is 10%."""
    medians = numbers([rank.get("step_ms", {}).get("median") for rank in run.get("ranks", [])])
    return max(medians) / min(medians) - 1 if len(medians) > 1 and min(medians) > 0 else None


def late_rank(run: Run) -> tuple[int, float] | None:
    """The straggler (the rank that waits least) and the longest wait for it, in ms per step."""
    waits = []
    for rank in run.get("ranks", []):
        middle = finite(rank.get("step_ms", {}).get("median"))
        wait = finite(rank.get("breakdown", {}).get("wait"))
        if middle is not None and wait is not None:
            waits.append((middle * wait, rank["rank"]))
    if len(waits) < 2:
        return None
    return min(waits)[1], max(waits)[0] - min(waits)[0]


def ranking(table: Sequence[Row]) -> list[Row]:
    """Finished runs, the fastest first."""
    return sorted((row for row in table if row.ok and row.median), key=per_sample)


def with_several_ranks(order: Sequence[Row]) -> list[Row]:
    """The runs that exchange gradients, in the same order; what a comparison is about if one rank alone is faster."""
    return [row for row in order if workers(row.run) > 1]


def that_train_well(order: Sequence[Row]) -> list[Row]:
    """The runs whose loss is not behind, in the same order: the speed of the others says little."""
    return [row for row in order if row.behind is None]


def per_sample(row: Row) -> float:
    """Median step time divided by the batch, because steps of different batches cannot be ranked by time alone."""
    return (row.median or 0.0) / (finite(row.run.get("batch")) or 1.0)


def _row(run: Run, label: str, runs: Sequence[Run], names: Sequence[str]) -> Row:
    base = baseline(run, runs)
    single = next((r for r in runs if r["strategy"] == BASELINE and ok(r) and r is not run), None)
    late = late_rank(run)
    series = steady(run)
    losses = run.get("loss", [])
    scaled = efficiency(run, base)
    superlinear = scaled is not None and scaled > _MOST_EFFICIENT
    return Row(
        label=label,
        run=run,
        ok=ok(run),
        median=step_median(run),
        interval=stats.median_interval(series) if series else None,
        speedup=speedup(run, base),
        efficiency=None if superlinear else scaled,
        superlinear=superlinear,
        against=next((n for r, n in zip(runs, names, strict=True) if r is base), None),
        wire_ratio=wire_ratio(run),
        final_loss=finite(losses[-1]) if losses else None,
        loss_difference=loss_difference(run, single) if single is not None else None,
        nearest=_nearest(run, runs, names),
        behind=_behind(run, runs, names),
        rank_spread=rank_spread(run),
        late_rank=late[0] if late else None,
        waited_ms=late[1] if late else None,
    )


def _nearest(run: Run, runs: Sequence[Run], names: Sequence[str]) -> Nearest | None:
    others = [
        Nearest(name, gap)
        for other, name in zip(runs, names, strict=True)
        if other is not run and ok(other) and ok(run) and (gap := loss_difference(run, other)) is not None
    ]
    return min(others, key=lambda n: n.difference, default=None)


def _behind(run: Run, runs: Sequence[Run], names: Sequence[str]) -> Behind | None:
    """Compare the late losses with those of the run of as many ranks that sends the most: it compresses least."""
    peers = {
        name: other
        for other, name in zip(runs, names, strict=True)
        if ok(other) and workers(other) == workers(run) > 1 and loss_difference(run, other) is not None
    }
    if not ok(run) or not peers:
        return None
    name = max(peers, key=lambda one: finite(peers[one].get("wire_bytes_per_step")) or 0.0)
    ours, theirs = run.get("loss", []), peers[name].get("loss", [])
    count = int(len(ours) * _LATE)
    if peers[name] is run or len(ours) != len(theirs) or count < _FEWEST:
        return None
    late, of_peer = (numbers(losses[-count:]) for losses in (ours, theirs))
    if len(of_peer) < count:
        return None
    if len(late) < count:
        return Behind(name, math.inf, count)
    mine, base = stats.mean(late), stats.mean(of_peer)
    gaps = [a - b for a, b in zip(late, of_peer, strict=True)]
    clear = stats.mean(gaps) > stats.two_standard_errors(gaps)
    return Behind(name, mine / base, count) if 0 < base * _CLEARLY_WORSE < mine and clear else None
