"""The dependency graph of a recorded run: background work and training threads as events that can be replayed in order.

An event depends only on events with a smaller key, so one pass in the order of keys replays everything. Each event
starts as long after the last event that it needs as it did in the recording.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from syncline.sim.replay.background import Work, background_work, exchanged_units, is_background, network_order
from syncline.sim.replay.dependencies import Start, Steps, has_barrier, ready_shares, thread_needs, work_starts
from syncline.sim.replay.training_thread import STALL, Thread
from syncline.trace.merge.exchanges import Exchange
from syncline.trace.span import BLOCKED, STEP, Span

OVER, THREAD, START, EMPTY = range(4)
"""Kinds of events, in their order at one moment: work ends, a thread moves on, work starts, empty work ends."""


@dataclass(slots=True)
class Move:
    """A training thread runs a piece of a lane, or stalls until its blocker has ended; then it waits for `needs`."""

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
    """A recorded run, ready to be replayed. Numbers of work are indices into `work`."""

    work: list[Work]
    threads: dict[int, Thread]
    steps: Steps
    barrier: bool
    """Whether the update waits for every exchange of its step; otherwise a unit's next forward waits for its own."""
    starts: list[Start]
    events: list[tuple[int, int, int]] = field(default_factory=list)
    """Time, kind, and index into `moves` or `work`."""
    moves: list[Move] = field(default_factory=list)
    joins: list[list[int]] = field(default_factory=list)
    """By work: the same exchange on the ranks that it waits for."""
    before: list[int] = field(default_factory=list)
    """By work: the exchange that had the network before it, or -1."""


def build_graph(spans: Sequence[Span], exchanges: Sequence[Exchange]) -> Graph:
    """The graph of these spans, which hold whole steps. Ranks without steps (aggregators) are left out."""
    steps: Steps = defaultdict(dict)
    for span in spans:
        if span.lane == STEP:
            steps[span.rank][span.step] = (span.start, span.end)
    spans = [span for span in spans if span.rank in steps]
    exchanges = [
        Exchange(one.name, one.unit, one.step, tuple(member for member in one.members if member.rank in steps))
        for one in exchanges
    ]
    units = exchanged_units(one for one in exchanges if any(member.transfer for member in one.members))
    own: dict[int, list[Span]] = {rank: [] for rank in steps}
    for span in spans:
        if not is_background(span, units):
            own[span.rank].append(span)
    work = background_work(spans, exchanges, units)
    by_rank: dict[int, list[Work]] = {rank: [] for rank in steps}
    for one in work:
        by_rank[one.rank].append(one)
    blocked = any(span.lane == "wait" and span.name == BLOCKED for span in spans)
    threads = {rank: Thread(own[rank], by_rank[rank], blocked=blocked) for rank in steps}
    shares = ready_shares(work, threads)
    barrier = has_barrier(work, threads, steps)
    graph = Graph(work, threads, steps, barrier, work_starts(work, threads, by_rank, shares))
    needs = thread_needs(threads, by_rank, steps, shares, barrier=barrier)
    for rank, thread in threads.items():
        moments = {moment for one in by_rank[rank] for moment in graph.starts[one.place].moments}
        _add_moves(graph, rank, thread, moments, needs[rank])
    for one in work:
        graph.events.append((one.start, START, one.place))
        graph.events.append((one.end, OVER if one.end > one.start else EMPTY, one.place))
    graph.events.sort()
    _connect(graph)
    return graph


def _add_moves(graph: Graph, rank: int, thread: Thread, cuts: set[int], needs: dict[int, list[int]]) -> None:
    """The thread's segments as moves, split where work starts or is needed."""
    moments = sorted(cuts | set(needs))
    at = 0
    for segment in thread.segments:
        inner, start = [], segment.start
        while at < len(moments) and moments[at] < segment.end:
            if moments[at] > start and segment.lane != STALL:
                inner.append(moments[at])
            at += 1
        for end in [*inner, segment.end]:
            move = Move(rank, end, end - start, segment.lane, segment.step, needs=needs.get(end, ()))
            if segment.lane == STALL and segment.blocker is not None:
                move.blocker, move.lag = segment.blocker.place, segment.end - max(segment.start, segment.blocker.end)
            graph.events.append((end, THREAD, len(graph.moves)))
            graph.moves.append(move)
            start = end


def _connect(graph: Graph) -> None:
    """Link the ranks' parts of each exchange, and the exchanges of a rank in the order of the network."""
    graph.joins = [[other.place for other in one.members if other.start < one.end] for one in graph.work]
    graph.before = [-1] * len(graph.work)
    for line in network_order(graph.work).values():
        for earlier, later in pairwise(line):
            graph.before[later.place] = earlier.place
