"""The critical path of one step across ranks, followed backwards from the end of the step.

Work depends on the earlier work of its rank; a transfer depends on the last rank to join its exchange. So the path
leaves a rank that waited and continues on the rank that it waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from syncline.stats import mean_or_zero
from syncline.trace.analysis.steps import Prepared
from syncline.trace.analysis.timeline import BLOCKED_PHASES
from syncline.trace.merge.exchanges import Exchange, Member

_LANES = {"exposed_encode": "encode", "exposed_exchange": "exchange"}
_KERNEL_GAP = 30_000  # nanoseconds


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A segment of the path: its rank, its lane, its length, and the unit if it is an exchange."""

    rank: int
    lane: str
    unit: str
    ms: float


def typical_step(trace: Prepared, steps: Sequence[int]) -> int:
    """The step whose time is nearest to the mean of these."""
    series = trace.series(steps)
    usual = mean_or_zero(series)
    return min(zip(steps, series, strict=True), key=lambda pair: abs(pair[1] - usual))[0]


def critical_path(trace: Prepared, step: int) -> list[PathSegment]:
    """The path of a step in the order of time; its segments sum to the time from the step's start to its last end."""
    begin = min(trace.bounds[rank][step][0] for rank in trace.ranks)
    rank = max(trace.ranks, key=lambda one: trace.bounds[one][step][1])
    at = trace.bounds[rank][step][1]
    near = _near(trace.exchanges, begin, at)
    segments: list[tuple[int, str, str, int]] = []
    seen = {rank}  # at this time: ranks that wait for each other would lead back and forth
    while at > (start := trace.bounds[rank][step][0] if rank in trace.bounds else begin):
        phase, since = trace.timelines[rank].at(at)
        since, unit, following = max(since, start), "", rank
        if phase in BLOCKED_PHASES and (blocked := _under_way(near.get(rank, ()), at, moving=phase != "wait")):
            exchange, mine = blocked
            unit, late = exchange.unit, exchange.late_rank(mine)
            if late in seen and mine.started >= at:
                late = None
            if mine.started < at:
                # Compute hid the start of the transfer; the path still runs through it from there.
                since = max(start, mine.started)
            elif late is not None:
                since = at
            if late is not None and (since == mine.started or since == at):
                following = late
        segments.append((rank, _LANES.get(phase, phase), unit, at - since))
        seen = {following} if since < at else seen | {following}
        at, rank = since, following
    return _joined(segments)


def _near(exchanges: Sequence[Exchange], begin: int, end: int) -> dict[int, list[tuple[Exchange, Member]]]:
    """By rank: the exchanges that overlap this time."""
    result: dict[int, list[tuple[Exchange, Member]]] = {}
    for exchange in exchanges:
        for member in exchange.members:
            if member.ended > begin and member.joined < end:
                result.setdefault(member.rank, []).append((exchange, member))
    return result


def _under_way(near: Sequence[tuple[Exchange, Member]], at: int, *, moving: bool) -> tuple[Exchange, Member] | None:
    """The exchange in which a rank was blocked just before `at`: the one that ends first from there on."""
    inside = [pair for pair in near if pair[1].joined < at <= pair[1].ended and (pair[1].started < at) == moving]
    return min(inside, key=lambda pair: (pair[1].ended, -pair[1].started), default=None)


def _joined(segments: Sequence[tuple[int, str, str, int]]) -> list[PathSegment]:
    """Neighbours of the same rank, lane and unit as one segment, in the order of time.

    The usual gap between two kernels belongs to the lane of both.
    """
    lasting = [segment for segment in reversed(segments) if segment[3] > 0]
    for place, (before, gap, after) in enumerate(zip(lasting, lasting[1:], lasting[2:], strict=False), start=1):
        if gap[1] == "other" and gap[3] < _KERNEL_GAP and before[:3] == after[:3]:
            lasting[place] = (*before[:3], gap[3])
    joined = groupby(lasting, key=lambda segment: segment[:3])
    return [PathSegment(rank, lane, unit, sum(ns for *_, ns in of) / 1e6) for (rank, lane, unit), of in joined]
