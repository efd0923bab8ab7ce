"""The least that a step can take: its compute or its bytes on the wire, whichever is longer."""

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.stats import mean_or_zero
from syncline.trace.analysis.network import Wire
from syncline.trace.analysis.steps import Prepared

COMPUTE = ("data", "forward", "backward", "update")
"""Phases of the training thread's own work."""


@dataclass(frozen=True)
class Bound:
    """`compute_ms` is the slowest rank's, None where there is no compute; `distance` is step over bound, less 1."""

    compute_ms: float | None
    wire_ms: float | None
    bound_ms: float | None
    distance: float | None

    def as_json(self) -> dict[str, float | None]:
        """As in the analysis."""
        return {
            "compute_ms": self.compute_ms,
            "wire_ms": self.wire_ms,
            "bound_ms": self.bound_ms,
            "distance": self.distance,
        }


def bound(trace: Prepared, steps: Sequence[int], found: Wire | None, *, step_ms: float) -> Bound:
    """How far these steps are from what is possible with perfect overlap."""
    sums = [sum(mean_or_zero(trace.phase(phase, rank, steps)) for phase in COMPUTE) for rank in trace.ranks]
    compute = max(sums, default=0.0) or None
    on_wire = found.wire_ms if found is not None else None
    # Without compute nothing is known of what could hide the wire.
    least = None if compute is None else max(compute, on_wire or 0.0)
    return Bound(compute, on_wire, least, step_ms / least - 1 if least else None)
