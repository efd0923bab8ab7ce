"""The critical path of one step across ranks: walked back from its last end through what had to end before it.

Work depends on the same rank's work before it; a transfer on the rank that came last to its exchange. So the path
leaves a rank that waited and goes on where the wait was caused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.stats import median_or_zero
from syncline.trace.analysis.exchanges import Joined, Meeting
from syncline.trace.analysis.steps import Prepared

_LANES = {"exposed_encode": "encode", "exposed_exchange": "exchange"}
_STANDING = ("exposed_exchange", "wait")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the path: on which rank, in which lane, and the unit where it is an exchange."""

    rank: int
    lane: str
    unit: str
    ms: float

    def as_json(self) -> dict[str, object]:
        """As in the analysis."""
        return {"rank": self.rank, "lane": self.lane, "unit": self.unit, "ms": self.ms}


def typical(trace: Prepared, steps: Sequence[int]) -> int:
    """The step whose time is nearest to the median."""
    series = trace.series(steps)
    usual = median_or_zero(series)
    return min(zip(steps, series, strict=True), key=lambda pair: abs(pair[1] - usual))[0]


def critical_path(trace: Prepared, found: Sequence[Meeting], step: int) -> list[Piece]:
    """The path of a step, in the order of time; its pieces sum to the time from the step's start to its last end."""
    begin = min(trace.bounds[rank][step][0] for rank in trace.ranks)
    rank = max(trace.ranks, key=lambda one: trace.bounds[one][step][1])
    at = trace.bounds[rank][step][1]
    near = _near(found, begin, at)
    pieces: list[tuple[int, str, str, int]] = []
    seen = {rank}  # at this time: ranks that wait for each other would lead back and forth
    while at > (start := trace.bounds[rank][step][0] if rank in trace.bounds else begin):
        phase, since, _ = trace.lines[rank].at(at)
        since, unit, following = max(since, start), "", rank
        if phase in _STANDING and (standing := _under_way(near.get(rank, ()), at, moving=phase != "wait")):
            meeting, mine = standing
            unit, late = meeting.unit, meeting.awaited(mine)
            if late in seen and mine.begin >= at:
                late = None
            if mine.begin < at:
                # Compute hid its beginning, and yet it is on the path from there.
                since = max(start, mine.begin)
            elif late is not None:
                since = at
            if late is not None and (since == mine.begin or since == at):
                following = late
        pieces.append((rank, _LANES.get(phase, phase), unit, at - since))
        seen = {following} if since < at else seen | {following}
        at, rank = since, following
    return _joined(pieces)


def _near(found: Sequence[Meeting], begin: int, end: int) -> dict[int, list[tuple[Meeting, Joined]]]:
    """By rank the exchanges that reach into this time."""
    result: dict[int, list[tuple[Meeting, Joined]]] = {}
    for meeting in found:
        for one in meeting.joined:
            if one.end > begin and one.at < end:
                result.setdefault(one.rank, []).append((meeting, one))
    return result


def _under_way(near: Sequence[tuple[Meeting, Joined]], at: int, *, moving: bool) -> tuple[Meeting, Joined] | None:
    """The exchange that a rank stood in just before `at`: the one that ends first from there on, as it lets it go."""
    inside = [pair for pair in near if pair[1].at < at <= pair[1].end and (pair[1].begin < at) == moving]
    return min(inside, key=lambda pair: (pair[1].end, -pair[1].begin), default=None)


def _joined(pieces: Sequence[tuple[int, str, str, int]]) -> list[Piece]:
    result: list[Piece] = []
    for rank, lane, unit, ns in reversed(pieces):
        if result and (result[-1].rank, result[-1].lane, result[-1].unit) == (rank, lane, unit):
            result[-1] = Piece(rank, lane, unit, result[-1].ms + ns / 1e6)
        elif ns > 0:
            result.append(Piece(rank, lane, unit, ns / 1e6))
    return result
