"""When recorded work could start: after its gradient, its unit's earlier work, and what it had queued behind."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from syncline.sim.replay.thread import Thread
from syncline.sim.replay.work import Work

NEAR = 150_000
"""Nanoseconds: what starts so soon after something else was over had waited for it."""

Ready = Mapping[tuple[int, str], float]
"""By rank and unit: the share of the backward pass after which its gradient was ready, at the latest."""


@dataclass(slots=True)
class Start:
    """Work starts `lag` after the last of other work (`after`) and of moments of its rank's thread."""

    after: list[int] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)
    lag: int = 0


def ready(work: Sequence[Work], threads: Mapping[int, Thread]) -> Ready:
    """The earliest of all steps counts: in the others the unit had to queue."""
    first: dict[tuple[int, int, str], int] = {}
    for one in work:
        key = one.rank, one.step, one.unit
        first[key] = min(first.get(key, one.start), one.start)
    found: dict[tuple[int, str], float] = {}
    for (rank, step, unit), start in first.items():
        share = threads[rank].share(step, "backward", start)
        if share is not None:
            found[rank, unit] = min(found.get((rank, unit), 1.0), share)
    return found


def starts(
    work: Sequence[Work], threads: Mapping[int, Thread], beside: Mapping[int, Sequence[Work]], shares: Ready
) -> list[Start]:
    """What each needs before it starts, by its place."""
    made = [Start() for _ in work]
    for rank, mine in beside.items():
        thread = threads[rank]
        ended = sorted((w for w in mine if w.end > w.start), key=lambda w: (w.end, w.place))
        ends = [w.end for w in ended]
        # By step and unit, the last work of each part.
        parts: dict[tuple[int, str], dict[str, Work]] = defaultdict(dict)
        for one in mine:
            at = bisect_right(ends, one.start) - 1
            other = ended[at] if at >= 0 else None
            of_unit = parts[one.step, one.base]
            chain = [w for unit, w in of_unit.items() if one.lane == "update" or unit == one.unit]
            made[one.place] = _start(one, chain, other, thread, shares)
            of_unit[one.unit] = one
    return made


def _start(one: Work, chain: Sequence[Work], other: Work | None, thread: Thread, shares: Ready) -> Start:
    """`chain`: what came before it in its unit; `other`: what was over last on its rank, whichever unit's."""
    earlier = [w for w in chain if w.start < w.end <= one.start]
    near = other is not None and one.start - other.end <= NEAR
    moments = []
    if one.lane == "update":
        due = thread.first(one.step, "update")  # where the optimizer's step is called
        moments = [due] if due is not None and due <= one.start else []
    elif not earlier:
        moments = [_asked(one, thread, shares, queued=near)]
    moments = [moment for moment in moments if thread.starts[0] <= moment <= thread.pieces[-1].end]
    after = [w.place for w in earlier]
    latest = max([w.end for w in earlier] + moments, default=-1)
    if other is not None and other.end > latest and (near or latest < 0):
        after.append(other.place)
        latest = other.end
    return Start(after, moments, one.start - latest if latest >= 0 else 0)


def _asked(one: Work, thread: Thread, shares: Ready, *, queued: bool) -> int:
    """The moment of the thread at which a unit's first work could start: now, or if it had to queue, earlier."""
    stall = thread.stall(one.start)
    standing = stall is not None and stall.start < one.start
    if standing or queued:
        share = shares.get((one.rank, one.unit))
        when = None if share is None else thread.time(one.step, "backward", share)
        if when is not None and when <= one.start:
            return when
    return stall.start if stall is not None and standing else one.start
