"""Where the time of a rank goes, by phase: shares and ms a step, and the same for every single step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from syncline.stats import mean_or_zero, median_mean_p95
from syncline.trace.analysis.steps import Prepared
from syncline.trace.span import PHASES


@dataclass(frozen=True)
class Breakdown:
    """One rank's steps: `breakdown` sums to 1, `breakdown_ms` to the mean step."""

    rank: int
    step_ms: dict[str, float]
    breakdown: dict[str, float]
    breakdown_ms: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """As in the analysis."""
        return asdict(self)


def breakdowns(trace: Prepared, steps: Sequence[int]) -> tuple[Breakdown, ...]:
    """A row a rank, over these steps."""
    rows = []
    for rank in trace.ranks:
        ms = {phase: mean_or_zero(trace.phase(phase, rank, steps)) for phase in PHASES}
        whole = sum(ms.values())
        # Steps without any length are nothing known, and shares sum to 1 all the same.
        shares = {phase: value / whole if whole else float(phase == "other") for phase, value in ms.items()}
        rows.append(Breakdown(rank, median_mean_p95([trace.ms(rank, step) for step in steps]), shares, ms))
    return tuple(rows)


def per_step(trace: Prepared, *, most: int) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """A row a rank and step, evenly thinned to about `most`, and a note where it was."""
    every = -(-len(trace.steps) * len(trace.ranks) // most)
    kept = trace.steps[:: max(1, every)]
    rows = tuple(
        {
            "rank": rank,
            "step": step,
            "ms": trace.ms(rank, step),
            "breakdown_ms": {phase: ns / 1e6 for phase, ns in trace.parts[rank][step].items()},
        }
        for rank in trace.ranks
        for step in kept
    )
    return rows, [f"of {len(trace.steps)} steps every {every}th is in the table of single steps"] if every > 1 else []
