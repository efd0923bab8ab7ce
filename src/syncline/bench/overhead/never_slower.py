"""`bench overhead --never-slower`: attached models against the best DDP on the CPU, on fast and on slow networks.

Cells of a model, a number of ranks and a network. In each, DDP with several bucket sizes, dense and with BF16, and
attached models train in blocks that alternate. In others the first steps of a job are timed, with all tuning. The
result has one line per claim: the paired ratio, its quartiles, and the limit. Some cells can be measured again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from syncline.bench.overhead import startup
from syncline.bench.overhead.rank import run_rank
from syncline.bench.overhead.rows import against_rival, rivals_of, row
from syncline.bench.ranks import Progress, busy_warnings, default_options, ranks_started, result_of
from syncline.bench.training import Options
from syncline.errors import UsageError

WIDE, NARROW = "resnet50", "resnet50(width=0.125)"
"""161 tensors of 102 MB, and the same number of small ones."""
DDP = ("ddp", "ddp(bucket_mb=5)", "ddp(bucket_mb=100)", "ddp-bf16", "ddp-bf16(bucket_mb=5)")
DENSE, BF16, AUTO = "syncline", "syncline(bf16)", "syncline(auto)"
STEADY, FIRST, CACHED = 1.02, 1.05, 1.00
"""Limits: a steady step, the first steps of a new job, and of a second run."""


@dataclass(frozen=True)
class Cell:
    """A setting in which all ways are compared: steady steps, or the first steps of a job."""

    model: str
    ranks: int
    bandwidth: str = ""
    ours: tuple[str, ...] = (DENSE, BF16, AUTO)
    blocks: int = 6
    steps: int = 5
    starts: int = 1
    """Starts of the ranks, with as many blocks in each. Where a model's memory lies differs between starts, and with it
    the speed of equal ways, by some percent."""
    rounds: int = 0
    """If not 0: the first steps are timed, in this many rounds of new processes. Even: their order alternates."""

    @property
    def network(self) -> str:
        """The network, in words."""
        return self.bandwidth or "loopback"

    @property
    def label(self) -> str:
        """All that makes this cell differ from others, in words."""
        return f"{self.model}, {self.ranks} ranks, {self.network}" + (", first steps" if self.rounds else "")


CELLS = (
    *(Cell(WIDE, ranks, blocks=blocks, starts=4) for ranks, blocks in ((2, 4), (4, 3))),
    *(Cell(NARROW, ranks, blocks=blocks, starts=8) for ranks, blocks in ((2, 8), (4, 6))),
    *(Cell(WIDE, ranks, "1Gbit", (AUTO,), blocks=6, steps=3) for ranks in (2, 4)),
    *(Cell(NARROW, ranks, "1Gbit", (AUTO,), blocks=20) for ranks in (2, 4)),
    Cell(WIDE, 2, "200Mbit", (AUTO,), blocks=2, steps=2),
    *(Cell(NARROW, ranks, "200Mbit", (AUTO,), blocks=8) for ranks in (2, 4)),
    Cell(WIDE, 2, rounds=4),
    Cell(WIDE, 2, "1Gbit", rounds=2),
)
QUICK = (
    Cell(NARROW, 2, blocks=2, steps=3, starts=2),
    Cell(NARROW, 2, "200Mbit", (AUTO,), blocks=2, steps=3),
    Cell(NARROW, 2, rounds=1),
)


def measure(
    *,
    quick: bool = False,
    only: str = "",
    before: dict[str, Any] | None = None,
    progress: Progress = print,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run all cells; `quick`: three small ones, to see that all works. `save` gets the result after each cell.

    `only`: the cells whose label contains this text; others are taken from the result `before`.
    """
    cells = QUICK if quick else CELLS
    chosen = [cell for cell in cells if only in cell.label]
    if not chosen:
        raise UsageError(f"no cell's label contains '{only}': {'; '.join(cell.label for cell in cells)}")
    kept = {} if before is None or not only else {found["label"]: found for found in before["cells"]}
    flags = " --never-slower" + (" --quick" if quick else "")
    result: dict[str, Any] = {}
    for cell in chosen:
        progress(cell.label)
        kept[cell.label] = _found(cell, progress)
        found = [kept[one.label] for one in cells if one.label in kept]
        busy = max(one["busy_before"] for one in found)
        lines = [line for one in found for line in claims(one)]
        result = result_of("overhead", default_options("cpu", (), {}), lines, busy=busy, cells=found)
        del result["setting"]  # every cell has its own
        result["command"] = f"python -m syncline.bench.overhead{flags}"
        result["warnings"] = [f"{one['label']}: {text}" for one in found for text in busy_warnings(one["busy_before"])]
        save(result)
    return result


def _found(cell: Cell, progress: Progress) -> dict[str, Any]:
    """What was measured in a cell, as it is written to the file."""
    began = time.perf_counter()
    setting = {"label": cell.label, "model": cell.model, "ranks": cell.ranks, "network": cell.network}
    found = _first_steps(cell, progress) if cell.rounds else _steady(cell, progress)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {**setting, "measured": at, "seconds": round(time.perf_counter() - began, 1), **found}


def _options(cell: Cell, ways: Sequence[str]) -> Options:
    asked = {"model": cell.model, "ranks": cell.ranks, "blocks": cell.blocks, "steps": cell.steps, "warm_up": 2}
    return default_options("cpu", ways, {**asked, "bandwidth": cell.bandwidth, "memory": False})


def _steady(cell: Cell, progress: Progress) -> dict[str, Any]:
    """Blocks of steady steps: the rows of all ways, and ours against their rivals."""
    ways = (*DDP, *cell.ours)
    if cell.bandwidth and cell.model == WIDE:
        ways = tuple(way for way in ways if "bucket_mb=100" not in way)  # never the best there, and slow
    # A job has one engine, so each of ours has ranks of its own, beside its rivals alone. `ddp` is in all ratios.
    beside = {ours: tuple(dict.fromkeys(["ddp", *rivals_of(ours, ways), ours])) for ours in cell.ours}
    starts: dict[str, list[list[dict[str, Any]]]] = {ours: [] for ours in cell.ours}
    plans: dict[str, list[Any]] = {way: [] for way in ways}
    busy_before = []
    for start in range(cell.starts):
        for ours, group in beside.items():
            first = start * len(group) // cell.starts
            order = (*group[first:], *group[:first])  # the place among the ways must not matter either
            with ranks_started(run_rank, _options(cell, order), progress) as (found, _, busy):
                starts[ours].append(found)
                busy_before.append(busy)
                plans[ours].append(found[0]["ways"][ours]["plan"])
    with_way = {way: next(ours for ours in cell.ours if way in beside[ours]) for way in ways}
    records = {ours: [record for found in starts[ours] for record in found] for ours in cell.ours}
    rows = [{**row(name, records[ours]), "plans": plans[name]} for name, ours in with_way.items()]
    against = [against_rival(name, starts[name]) for name in cell.ours]
    # Later starts see the end of the one before as load.
    return {"busy_before": round(busy_before[0], 3), "starts": cell.starts, "rows": rows, "against": against}


def _first_steps(cell: Cell, progress: Progress) -> dict[str, Any]:
    options = replace(_options(cell, startup.WAYS), steps=startup.STEPS)
    rows, busy = startup.measure(options, rounds=cell.rounds, progress=progress)
    return {"busy_before": round(busy, 3), "first_steps": rows}


def claims(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of the result for one cell."""
    made = []
    for line in found.get("against", ()):
        made.append(_claim(found, line["way"], f"best DDP: {line['rival']}", line["step"], STEADY))
    for line in found.get("against", ()):
        if line["way"] != AUTO:
            made.append(_claim(found, line["way"], f"CPU time of {line['rival']}", line["cpu"], STEADY))
    for line in found.get("first_steps", ()):
        what = f"DDP's first {startup.STEPS} steps" + (", second run" if line["cached"] else "")
        made.append(_claim(found, line["way"], what, line["wall"], CACHED if line["cached"] else FIRST))
    return made


def _claim(found: dict[str, Any], way: str, against: str, ratio: Any, limit: float) -> dict[str, Any]:
    """A line of the result: a ratio, its limit, and whether the median is within it."""
    place = {key: found[key] for key in ("model", "ranks", "network")}
    return {**place, "way": way, "against": against, "ratio": ratio, "limit": limit, "held": ratio["median"] <= limit}


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: one line per claim."""
    lines = []
    for claim in result["rows"]:
        ratio = claim["ratio"]
        spread = f"{ratio['low']:.2f}-{ratio['high']:.2f}"
        held = "yes" if claim["held"] else "no"
        where = [claim["model"], str(claim["ranks"]), claim["network"], claim["way"], claim["against"]]
        lines.append([*where, f"{ratio['median']:.3f}", spread, f"{claim['limit']:.2f}", held])
    return ["model", "ranks", "network", "way", "against", "ratio", "quartiles", "limit", "held"], lines
