"""Dependencies on one rank: what must end before work can start, and before the training thread can continue."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from syncline.sim.replay.background import Work, base_of
from syncline.sim.replay.training_thread import Thread

NEAR = 150_000
"""Nanoseconds: work that starts so soon after the end of other work had waited for it."""
_BARRIER = 0.2  # if exchanges run into the update in at most this share of steps, the update still waits for all

ReadyShares = Mapping[str, float]
"""By unit: the share of the backward pass after which its gradient was ready, at the latest."""


def ready_shares(mine: Sequence[Work], thread: Thread) -> ReadyShares:
    """When each unit was ready, from the step in which it started earliest: in the others it had to queue."""
    first: dict[tuple[int, str], int] = {}
    for one in mine:
        first.setdefault((one.step, one.unit), one.start)
    found: dict[str, float] = {}
    for (step, unit), start in first.items():
        share = thread.share_done(step, "backward", start)
        if share is not None:
            found[unit] = min(found.get(unit, 1.0), share)
    return found


def set_starts(mine: Sequence[Work], thread: Thread, shares: ReadyShares) -> None:
    """Set what each piece of work needs before it starts: `after`, `moments` and `lag`."""
    ended = sorted((w for w in mine if w.end > w.start), key=lambda w: (w.end, w.place))
    ends = [w.end for w in ended]
    # By step and unit: the last work of each part.
    parts: dict[tuple[int, str], dict[str, Work]] = defaultdict(dict)
    for one in mine:
        of_unit = parts[one.step, one.base]
        earlier = [w for unit, w in of_unit.items() if one.lane == "update" or unit == one.unit]
        earlier = [w for w in earlier if w.start < w.end <= one.start]
        of_unit[one.unit] = one
        at = bisect_right(ends, one.start) - 1
        other = ended[at] if at >= 0 else None  # the work of any unit that ended last
        near = other is not None and one.start - other.end <= NEAR
        moments = []
        if one.lane == "update":
            due = thread.first(one.step, "update")  # where the optimizer's step is called
            moments = [due] if due is not None and due <= one.start else []
        elif not earlier:
            moments = [_gradient_ready(one, thread, shares, queued=near)]
        one.moments = [moment for moment in moments if thread.starts[0] <= moment <= thread.segments[-1].end]
        latest = max([*(w.end for w in earlier), *one.moments], default=None)
        if other is not None and (latest is None or (near and other.end > latest)):
            earlier.append(other)
            latest = other.end
        one.after = [w.place for w in earlier]
        one.lag = 0 if latest is None else one.start - latest


def _gradient_ready(one: Work, thread: Thread, shares: ReadyShares, *, queued: bool) -> int:
    """The moment of the thread at which a unit's first work could start; before its start if it had to queue."""
    stall = thread.stall(one.start)
    stalled = stall is not None and stall.start < one.start
    if (stalled or queued) and one.unit in shares:
        when = thread.time_of_share(one.step, "backward", shares[one.unit])
        if when is not None and when <= one.start:
            return when
    return stall.start if stall is not None else one.start


def has_barrier(work: Sequence[Work], threads: Mapping[int, Thread]) -> bool:
    """Whether a step's update waits for all its exchanges, as with DDP; the engine lets them run into the next step."""
    late, seen = set(), set()
    for one in work:
        seen.add((one.rank, one.step))
        if one.end > _update_start(one, threads[one.rank]) + NEAR:
            late.add((one.rank, one.step))
    return len(late) <= _BARRIER * len(seen)


def thread_needs(mine: Sequence[Work], thread: Thread, shares: ReadyShares, *, barrier: bool) -> dict[int, list[int]]:
    """By moment of the thread: the work that must have ended by then, also where the thread did not wait."""
    needs: dict[int, list[int]] = defaultdict(list)
    if barrier:
        for one in mine:
            at = _update_start(one, thread)
            if one.start < one.end <= at:
                needs[at].append(one.place)
        return needs
    used = _first_uses(thread, shares)
    last: dict[tuple[int, str], Work] = {}
    for one in sorted(mine, key=lambda w: w.end):
        if one.end > one.start:
            last[one.step, one.base] = one
    for (step, unit), one in last.items():
        # A unit's next use waits for the last work on it. If that ended after the estimated use, its end is the use.
        use = thread.time_of_share(step + 1, "forward", used.get(unit, 1.0))
        latest = thread.first(step + 1, "backward")
        if use is not None and latest is not None and one.end <= latest:
            needs[min(max(use, one.end), latest)].append(one.place)
    return needs


def _update_start(one: Work, thread: Thread) -> int:
    """When the step of this work updates; without an update, when the step ends."""
    at = thread.first(one.step, "update")
    return thread.bounds.get(one.step, (0, one.end))[1] if at is None else at


def _first_uses(thread: Thread, shares: ReadyShares) -> dict[str, float]:
    """By unit: the share of the forward pass before its first use.

    Known where the thread was blocked for the unit. Otherwise units are assumed to be used in the reverse order in
    which their gradients are ready in the backward pass.
    """
    found: dict[str, float] = {}
    for unit, share in shares.items():
        found[base_of(unit)] = min(found.get(base_of(unit), 1.0), 1 - share)
    seen: dict[str, float] = {}
    for segment in thread.segments:
        if segment.blocker is not None and segment.blocker.step == segment.step - 1:
            share_now = thread.share_done(segment.step, "forward", segment.start)
            if share_now is not None:
                unit = segment.blocker.base
                seen[unit] = min(seen.get(unit, 1.0), share_now)
    return found | seen
