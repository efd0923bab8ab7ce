"""For what a training thread would have to stand still, also where it did not: then it was over in time."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from syncline.sim.replay.starts import NEAR, Ready
from syncline.sim.replay.thread import STALL, Thread
from syncline.sim.replay.work import Work, base_of

Steps = dict[int, dict[int, tuple[int, int]]]
"""By rank and step: when it starts and ends."""

_BARRIER = 0.2
"""In fewer steps than this share something may run into the update: then the update still waits for everything."""


def is_barrier(work: Sequence[Work], threads: Mapping[int, Thread], steps: Steps) -> bool:
    """Whether a step's update waits for all its exchanges, as DDP's; the engine lets them run into the next step."""
    late, seen = set(), set()
    for one in work:
        seen.add((one.rank, one.step))
        if one.end > _due(one, threads[one.rank], steps) + NEAR:
            late.add((one.rank, one.step))
    return len(late) <= _BARRIER * len(seen)


def needs(
    threads: Mapping[int, Thread],
    beside: Mapping[int, Sequence[Work]],
    steps: Steps,
    shares: Ready,
    *,
    barrier: bool,
) -> dict[int, dict[int, list[int]]]:
    """By rank and moment of its thread: work that must be over by then."""
    held: dict[int, dict[int, list[int]]] = {rank: defaultdict(list) for rank in threads}
    for rank, mine in beside.items():
        if not barrier:
            _forwards(held[rank], threads[rank], mine, steps[rank], _used(rank, threads[rank], shares))
            continue
        for one in mine:
            at = _due(one, threads[rank], steps)
            if one.start < one.end <= at:
                held[rank][at].append(one.place)
    return held


def _due(one: Work, thread: Thread, steps: Steps) -> int:
    """When the step of some work updates; without an update, when it ends."""
    at = thread.first(one.step, "update")
    return steps[one.rank].get(one.step, (0, one.end))[1] if at is None else at


def _forwards(
    held: dict[int, list[int]],
    thread: Thread,
    mine: Sequence[Work],
    steps: Mapping[int, tuple[int, int]],
    used: Mapping[str, float],
) -> None:
    """A unit's next use waits for the last work on it; where that was over later than we think it was used, then."""
    last: dict[tuple[int, str], Work] = {}
    for one in mine:
        if one.end > one.start and one.step + 1 in steps:
            known = last.get((one.step, one.base))
            last[one.step, one.base] = one if known is None or one.end >= known.end else known
    for (step, unit), one in last.items():
        at = thread.time(step + 1, "forward", used.get(unit, 1.0))
        latest = thread.first(step + 1, "backward")
        if at is not None and latest is not None and one.end <= latest:
            held[min(max(at, one.end), latest)].append(one.place)


def _used(rank: int, thread: Thread, shares: Ready) -> dict[str, float]:
    """By unit: the share of the forward pass before its first use.

    Seen where the thread stood for it; else what is ready last in the backward pass is taken to be used first.
    """
    found: dict[str, float] = {}
    for (who, unit), share in shares.items():
        if who == rank:
            base = base_of(unit)
            found[base] = min(found.get(base, 1.0), 1 - share)
    seen: dict[str, float] = {}
    for piece in thread.pieces:
        if piece.lane == STALL and piece.blocker is not None and piece.blocker.step == piece.step - 1:
            share_now = thread.share(piece.step, "forward", piece.start)
            if share_now is not None:
                unit = piece.blocker.base
                seen[unit] = min(seen.get(unit, 1.0), share_now)
    return found | seen
