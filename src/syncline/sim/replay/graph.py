"""What waited for what in a recorded run: its work and its training threads as events in an order that can be replayed.

An event depends on events with a smaller key only, so that one pass in the order of keys replays everything. Each
starts as long after the last thing that it needs as it did in the recording.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from syncline.sim.replay.needs import Steps, is_barrier, needs
from syncline.sim.replay.starts import Start, ready, starts
from syncline.sim.replay.thread import STALL, Thread
from syncline.sim.replay.work import Work, exchange_units, is_beside, meetings, wire_order, works
from syncline.trace.span import BLOCKED, STEP, Span

OVER, THREAD, START, EMPTY = range(4)
"""Kinds of events, in their order at one moment: work is over, a thread moves on, work starts, empty work is over."""


@dataclass(slots=True)
class Move:
    """A training thread goes on by a stretch of a lane, or stands until its blocker is over; then `needs` hold it."""

    rank: int
    time: int
    length: int
    lane: str
    step: int
    blocker: int = -1
    lag: int = 0
    needs: Sequence[int] = ()


@dataclass
class Graph:
    """A recorded run, ready to be replayed. Work is named by its place in `work`."""

    work: list[Work]
    threads: dict[int, Thread]
    steps: Steps
    barrier: bool
    """The update waits for every exchange of its step; else each unit's next forward waits for its own."""
    starts: list[Start]
    events: list[tuple[int, int, int]] = field(default_factory=list)
    """Moment, kind, and place in `moves` or `work`."""
    moves: list[Move] = field(default_factory=list)
    joins: list[list[int]] = field(default_factory=list)
    """By work: the ranks' parts in an exchange that it waits for."""
    before: list[int] = field(default_factory=list)
    """By work: the exchange that had the wire before it, or -1."""


def graph(spans: Sequence[Span]) -> Graph:
    """The graph of these spans, which hold whole steps. Ranks without steps (aggregators) are left out."""
    steps: Steps = defaultdict(dict)
    for span in spans:
        if span.lane == STEP:
            steps[span.rank][span.step] = (span.start, span.end)
    spans = [span for span in spans if span.rank in steps]
    units = exchange_units(spans)
    own: dict[int, list[Span]] = {rank: [] for rank in steps}
    for span in spans:
        if not is_beside(span, units):
            own[span.rank].append(span)
    work = works(spans, units)
    beside: dict[int, list[Work]] = {rank: [] for rank in steps}
    for one in work:
        beside[one.rank].append(one)
    blocked = any(span.lane == "wait" and span.name == BLOCKED for span in spans)
    threads = {rank: Thread(own[rank], beside[rank], blocked=blocked) for rank in steps}
    shares = ready(work, threads)
    barrier = is_barrier(work, threads, steps)
    made = Graph(work, threads, steps, barrier, starts(work, threads, beside, shares))
    held = needs(threads, beside, steps, shares, barrier=barrier)
    for rank, thread in threads.items():
        cuts = {moment for one in beside[rank] for moment in made.starts[one.place].moments}
        _move(made, rank, thread, cuts, held[rank])
    for one in work:
        made.events.append((one.start, START, one.place))
        made.events.append((one.end, OVER if one.end > one.start else EMPTY, one.place))
    made.events.sort()
    _connect(made)
    return made


def _move(made: Graph, rank: int, thread: Thread, cuts: set[int], held: dict[int, list[int]]) -> None:
    """The thread's pieces, cut where something starts or is needed."""
    moments = sorted(cuts | set(held))
    at = 0
    for piece in thread.pieces:
        inner, start = [], piece.start
        while at < len(moments) and moments[at] < piece.end:
            if moments[at] > start and piece.lane != STALL:
                inner.append(moments[at])
            at += 1
        for end in [*inner, piece.end]:
            move = Move(rank, end, end - start, piece.lane, piece.step, needs=held.get(end, ()))
            if piece.lane == STALL and piece.blocker is not None:
                move.blocker, move.lag = piece.blocker.place, piece.end - max(piece.start, piece.blocker.end)
            made.events.append((end, THREAD, len(made.moves)))
            made.moves.append(move)
            start = end


def _connect(made: Graph) -> None:
    """Who meets in an exchange, and who has the wire before whom."""
    made.joins = [[] for _ in made.work]
    made.before = [-1] * len(made.work)
    for group in meetings(made.work):
        for one in group:
            made.joins[one.place] = [other.place for other in group if other.start < one.end]
    for line in wire_order(made.work).values():
        for earlier, later in pairwise(line):
            made.before[later.place] = earlier.place
