"""Dependencies of a recorded run: what must end before work can start, and before a training thread can continue."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from syncline.sim.replay.background import Work, base_of
from syncline.sim.replay.training_thread import STALL, Thread

NEAR = 150_000
"""Nanoseconds: work that starts so soon after the end of other work had waited for it."""
_BARRIER = 0.2  # if exchanges run into the update in at most this share of steps, the update still waits for all

ReadyShares = Mapping[tuple[int, str], float]
"""By rank and unit: the share of the backward pass after which its gradient was ready, at the latest."""
Steps = dict[int, dict[int, tuple[int, int]]]
"""By rank and step: when it starts and ends."""


@dataclass(slots=True)
class Start:
    """Work starts `lag` after the last of other work (`after`) and of `moments` of its rank's thread."""

    after: list[int] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)
    lag: int = 0


def ready_shares(work: Sequence[Work], threads: Mapping[int, Thread]) -> ReadyShares:
    """When each unit was ready, from the step in which it started earliest: in the others it had to queue."""
    first: dict[tuple[int, int, str], int] = {}
    for one in work:
        key = one.rank, one.step, one.unit
        first[key] = min(first.get(key, one.start), one.start)
    found: dict[tuple[int, str], float] = {}
    for (rank, step, unit), start in first.items():
        share = threads[rank].share_done(step, "backward", start)
        if share is not None:
            found[rank, unit] = min(found.get((rank, unit), 1.0), share)
    return found


def work_starts(
    work: Sequence[Work], threads: Mapping[int, Thread], by_rank: Mapping[int, Sequence[Work]], shares: ReadyShares
) -> list[Start]:
    """What each piece of work needs before it starts, by its place."""
    made = [Start() for _ in work]
    for rank, mine in by_rank.items():
        thread = threads[rank]
        ended = sorted((w for w in mine if w.end > w.start), key=lambda w: (w.end, w.place))
        ends = [w.end for w in ended]
        # By step and unit: the last work of each part.
        parts: dict[tuple[int, str], dict[str, Work]] = defaultdict(dict)
        for one in mine:
            at = bisect_right(ends, one.start) - 1
            other = ended[at] if at >= 0 else None
            of_unit = parts[one.step, one.base]
            chain = [w for unit, w in of_unit.items() if one.lane == "update" or unit == one.unit]
            made[one.place] = _start(one, chain, other, thread, shares)
            of_unit[one.unit] = one
    return made


def _start(one: Work, chain: Sequence[Work], other: Work | None, thread: Thread, shares: ReadyShares) -> Start:
    """`chain`: earlier work on its unit; `other`: the work of any unit that ended last on its rank."""
    earlier = [w for w in chain if w.start < w.end <= one.start]
    near = other is not None and one.start - other.end <= NEAR
    moments = []
    if one.lane == "update":
        due = thread.first(one.step, "update")  # where the optimizer's step is called
        moments = [due] if due is not None and due <= one.start else []
    elif not earlier:
        moments = [_gradient_ready(one, thread, shares, queued=near)]
    moments = [moment for moment in moments if thread.starts[0] <= moment <= thread.segments[-1].end]
    after = [w.place for w in earlier]
    latest = max([w.end for w in earlier] + moments, default=-1)
    if other is not None and other.end > latest and (near or latest < 0):
        after.append(other.place)
        latest = other.end
    return Start(after, moments, one.start - latest if latest >= 0 else 0)


def _gradient_ready(one: Work, thread: Thread, shares: ReadyShares, *, queued: bool) -> int:
    """The moment of the thread at which a unit's first work could start; before its start if it had to queue."""
    stall = thread.stall(one.start)
    stalled = stall is not None and stall.start < one.start
    if stalled or queued:
        share = shares.get((one.rank, one.unit))
        when = None if share is None else thread.time_of_share(one.step, "backward", share)
        if when is not None and when <= one.start:
            return when
    return stall.start if stall is not None and stalled else one.start


def has_barrier(work: Sequence[Work], threads: Mapping[int, Thread], steps: Steps) -> bool:
    """Whether a step's update waits for all its exchanges, as with DDP; the engine lets them run into the next step."""
    late, seen = set(), set()
    for one in work:
        seen.add((one.rank, one.step))
        if one.end > _update_start(one, threads[one.rank], steps) + NEAR:
            late.add((one.rank, one.step))
    return len(late) <= _BARRIER * len(seen)


def thread_needs(
    threads: Mapping[int, Thread],
    by_rank: Mapping[int, Sequence[Work]],
    steps: Steps,
    shares: ReadyShares,
    *,
    barrier: bool,
) -> dict[int, dict[int, list[int]]]:
    """By rank and moment of its thread: the work that must have ended by then, also where the thread did not wait."""
    needs: dict[int, dict[int, list[int]]] = {rank: defaultdict(list) for rank in threads}
    for rank, mine in by_rank.items():
        if not barrier:
            _add_forward_needs(needs[rank], threads[rank], mine, steps[rank], _first_uses(rank, threads[rank], shares))
            continue
        for one in mine:
            at = _update_start(one, threads[rank], steps)
            if one.start < one.end <= at:
                needs[rank][at].append(one.place)
    return needs


def _update_start(one: Work, thread: Thread, steps: Steps) -> int:
    """When the step of this work updates; without an update, when the step ends."""
    at = thread.first(one.step, "update")
    return steps[one.rank].get(one.step, (0, one.end))[1] if at is None else at


def _add_forward_needs(
    needs: dict[int, list[int]],
    thread: Thread,
    mine: Sequence[Work],
    steps: Mapping[int, tuple[int, int]],
    used: Mapping[str, float],
) -> None:
    """A unit's next use waits for the last work on it. If that ended after the estimated use, its end is the use."""
    last: dict[tuple[int, str], Work] = {}
    for one in mine:
        if one.end > one.start and one.step + 1 in steps:
            known = last.get((one.step, one.base))
            last[one.step, one.base] = one if known is None or one.end >= known.end else known
    for (step, unit), one in last.items():
        at = thread.time_of_share(step + 1, "forward", used.get(unit, 1.0))
        latest = thread.first(step + 1, "backward")
        if at is not None and latest is not None and one.end <= latest:
            needs[min(max(at, one.end), latest)].append(one.place)


def _first_uses(rank: int, thread: Thread, shares: ReadyShares) -> dict[str, float]:
    """By unit: the share of the forward pass before its first use.

    Known where the thread was blocked for the unit. Otherwise units are assumed to be used in the reverse order in
    which their gradients are ready in the backward pass.
    """
    found: dict[str, float] = {}
    for (who, unit), share in shares.items():
        if who == rank:
            base = base_of(unit)
            found[base] = min(found.get(base, 1.0), 1 - share)
    seen: dict[str, float] = {}
    for segment in thread.segments:
        if segment.lane == STALL and segment.blocker is not None and segment.blocker.step == segment.step - 1:
            share_now = thread.share_done(segment.step, "forward", segment.start)
            if share_now is not None:
                unit = segment.blocker.base
                seen[unit] = min(seen.get(unit, 1.0), share_now)
    return found | seen
