"""Simulate a scenario for several numbers of nodes and bandwidths, and print the steps as a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.sim.steady.scenario import Scenario
from syncline.sim.steady.simulate import simulate


@dataclass(frozen=True)
class Prediction:
    """A predicted step, in seconds, for a number of nodes and a bandwidth in bytes per second."""

    nodes: int
    bandwidth: float
    step: float
    compute: float
    wire: float

    @property
    def bound(self) -> float:
        """max(compute, wire)."""
        return max(self.compute, self.wire)


def sweep(
    make: Callable[[int, float], Scenario], *, nodes: Sequence[int], bandwidths: Sequence[float]
) -> list[Prediction]:
    """Simulate `make(nodes, bandwidth)` for each pair, nodes first. The time to simulate does not grow with nodes."""
    rows = []
    for count in nodes:
        for bandwidth in bandwidths:
            outcome = simulate(make(count, bandwidth))
            rows.append(Prediction(count, bandwidth, outcome.step, outcome.compute, outcome.wire))
    return rows


def table(rows: Sequence[Prediction]) -> str:
    """Step times in milliseconds: a line for each number of nodes, a column for each bandwidth in Gbit/s."""
    bandwidths = sorted({row.bandwidth for row in rows})
    steps = {(row.nodes, row.bandwidth): f"{row.step * 1e3:.1f}" for row in rows}
    lines = [["nodes", *(f"{b * 8e-9:g} Gbit/s" for b in bandwidths)]]
    for count in sorted({row.nodes for row in rows}):
        lines.append([str(count), *(steps.get((count, b), "-") for b in bandwidths)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
