"""`bench overhead --never-slower`: attached models against the best DDP on the CPU, on fast and on slow networks.

Cells of a model, a number of ranks and a network. In each, DDP with several bucket sizes, dense and with BF16, and
attached models train in blocks that alternate. Then the first steps of a job are timed, with all tuning. The result has
one line per claim: the paired ratio, its quartiles, and the limit.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from syncline.bench.overhead import startup
from syncline.bench.overhead.rank import run_rank
from syncline.bench.overhead.rows import against_rival, row
from syncline.bench.ranks import Progress, default_options, ranks_started, result_of
from syncline.bench.training import Options

WIDE, NARROW = "resnet50", "resnet50(width=0.125)"
"""161 tensors of 102 MB, and the same number of small ones."""
DDP = ("ddp", "ddp(bucket_mb=5)", "ddp(bucket_mb=100)", "ddp-bf16", "ddp-bf16(bucket_mb=5)")
DENSE, BF16, AUTO = "syncline", "syncline(bf16)", "syncline(auto)"
STEADY, FIRST, CACHED = 1.02, 1.05, 1.00
"""Limits: a steady step, the first steps of a new job, and of a second run."""


@dataclass(frozen=True)
class Cell:
    """A setting in which all ways are compared."""

    model: str
    ranks: int
    bandwidth: str = ""
    ours: tuple[str, ...] = (DENSE, BF16, AUTO)
    blocks: int = 6
    steps: int = 5

    @property
    def network(self) -> str:
        """The network, in words."""
        return self.bandwidth or "loopback"


CELLS = (
    *(Cell(model, ranks, blocks=8 // ranks + 2) for model in (WIDE, NARROW) for ranks in (2, 4)),
    *(Cell(WIDE, ranks, "1Gbit", (AUTO,), blocks=4, steps=3) for ranks in (2, 4)),
    *(Cell(NARROW, ranks, "1Gbit", (AUTO,), blocks=4) for ranks in (2, 4)),
    Cell(WIDE, 2, "200Mbit", (AUTO,), blocks=2, steps=2),
    *(Cell(NARROW, ranks, "200Mbit", (AUTO,), blocks=4) for ranks in (2, 4)),
)
FIRST_STEPS = ((Cell(WIDE, 2), 3), (Cell(WIDE, 2, "1Gbit"), 2))
"""Where the first steps are timed, and the number of rounds."""
QUICK = (Cell(NARROW, 2, blocks=2, steps=3), Cell(NARROW, 2, "200Mbit", (AUTO,), blocks=2, steps=3))


def measure(*, quick: bool = False, progress: Progress = print) -> dict[str, Any]:
    """Run all cells; `quick`: two small ones, to see that all works."""
    began, cells, claims = time.perf_counter(), [], []
    options = default_options("cpu", (), {})
    for cell in QUICK if quick else CELLS:
        progress(f"{cell.model}, {cell.ranks} ranks, {cell.network}")
        found = _steady(cell, progress)
        cells.append(found)
        claims += [
            claim_of(cell, line["way"], f"best DDP: {line['rival']}", line["step"], STEADY) for line in found["against"]
        ]
        kinds = [line for line in found["against"] if line["way"] != AUTO]
        claims += [claim_of(cell, line["way"], f"CPU time of {line['rival']}", line["cpu"], STEADY) for line in kinds]
    first = []
    for cell, rounds in [(QUICK[0], 1)] if quick else FIRST_STEPS:
        options = _options(cell, startup.WAYS)
        rows = startup.measure(replace(options, steps=startup.STEPS), rounds=rounds, progress=progress)
        first.append({"model": cell.model, "ranks": cell.ranks, "network": cell.network, "rows": rows})
        for line in rows:
            what = f"DDP's first {startup.STEPS} steps" + (", second run" if line["cached"] else "")
            claims.append(claim_of(cell, line["way"], what, line["wall"], CACHED if line["cached"] else FIRST))
    result = result_of("overhead", options, claims, busy=cells[0]["busy_before"], cells=cells, first_steps=first)
    flags = " --never-slower" + (" --quick" if quick else "")
    return result | {"command": f"python -m syncline.bench.overhead{flags}", "seconds": time.perf_counter() - began}


def _options(cell: Cell, ways: Sequence[str]) -> Options:
    asked = {"model": cell.model, "ranks": cell.ranks, "blocks": cell.blocks, "steps": cell.steps, "warm_up": 2}
    return default_options("cpu", ways, {**asked, "bandwidth": cell.bandwidth, "memory": False})


def _steady(cell: Cell, progress: Progress) -> dict[str, Any]:
    """Blocks of steady steps: the rows of all ways, and ours against their rivals."""
    ways = (*DDP, *cell.ours)
    if cell.bandwidth and cell.model == WIDE:
        ways = tuple(way for way in ways if "bucket_mb=100" not in way)  # never the best there, and slow
    with ranks_started(run_rank, _options(cell, ways), progress) as (records, _, busy):
        rows = [row(name, records) for name in ways]
        against = [against_rival(name, records) for name in cell.ours]
    setting = {"model": cell.model, "ranks": cell.ranks, "network": cell.network, "busy_before": round(busy, 3)}
    return {**setting, "rows": rows, "against": against}


def claim_of(cell: Cell, way: str, against: str, ratio: Any, limit: float) -> dict[str, Any]:
    """A line of the result: a ratio, its limit, and whether the median is within it."""
    place = {"model": cell.model, "ranks": cell.ranks, "network": cell.network}
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
