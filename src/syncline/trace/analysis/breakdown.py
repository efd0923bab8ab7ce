"""Breakdown of step time by phase, for each rank and each step; the lower bound of the step time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from syncline.stats import mean_or_zero, median_mean_p95
from syncline.trace.analysis.network import NetworkUse
from syncline.trace.analysis.steps import Prepared
from syncline.trace.span import PHASES, TRAINING_LANES


@dataclass(frozen=True)
class Breakdown:
    """One rank's steps: `breakdown` sums to 1, `breakdown_ms` to the mean step."""

    rank: int
    step_ms: dict[str, float]
    breakdown: dict[str, float]
    breakdown_ms: dict[str, float]


def breakdowns(trace: Prepared, steps: Sequence[int]) -> tuple[Breakdown, ...]:
    """One row per rank, over these steps."""
    rows = []
    for rank in trace.ranks:
        ms = {phase: mean_or_zero(trace.phase(phase, rank, steps)) for phase in PHASES}
        whole = sum(ms.values())
        # Shares sum to 1 even if the steps have no length.
        shares = {phase: value / whole if whole else float(phase == "other") for phase, value in ms.items()}
        rows.append(Breakdown(rank, median_mean_p95([trace.ms(rank, step) for step in steps]), shares, ms))
    return tuple(rows)


def per_step(trace: Prepared, *, most: int) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """One row per rank and step, evenly thinned to about `most`; with a note if it was thinned."""
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
    return rows, [f"the table of single steps has one in {every} of {len(trace.steps):,} steps"] if every > 1 else []


@dataclass(frozen=True)
class Bound:
    """The least time that a step can take with perfect overlap: its compute or its bytes, whichever takes longer.

    `compute_ms` is the slowest rank's, None without compute; `distance` is step / bound - 1. No bound is above the
    step: ranks that do not wait for each other have steps of different lengths, and a link may be faster than it says.
    """

    compute_ms: float | None
    wire_ms: float | None
    bound_ms: float | None
    distance: float | None


def bound(trace: Prepared, steps: Sequence[int], network: NetworkUse | None, *, step_ms: float) -> Bound:
    """The bound of these steps, and how far they are above it."""
    sums = [sum(mean_or_zero(trace.phase(phase, rank, steps)) for phase in TRAINING_LANES) for rank in trace.ranks]
    compute = max(sums, default=0.0) or None
    transfers = network.wire_ms if network is not None else None
    # Without compute nobody knows what could hide the transfers.
    least = None if compute is None else min(max(compute, transfers or 0.0), step_ms)
    return Bound(compute, transfers, least, step_ms / least - 1 if least else None)
