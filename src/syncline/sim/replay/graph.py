"""The dependency graph of a recorded run, and its replay: background work and training threads as events in order.

An event depends only on events with a smaller key, so one pass in the order of keys replays everything. Each event
starts as long after the last event that it needs as it did in the recording.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.sim.replay.background import Work, split_background
from syncline.sim.replay.dependencies import has_barrier, ready_shares, set_starts, thread_needs
from syncline.sim.replay.training_thread import STALL, Segment, Thread
from syncline.stats import mean, median
from syncline.trace.merge.merge_ranks import Trace
from syncline.trace.span import BLOCKED

_OVER, _THREAD, _START, _EMPTY = range(4)
"""Kinds of events, in their order at one moment: work ends, a thread moves on, work starts, empty work ends."""


@dataclass(frozen=True)
class StepTimes:
    """Step times in milliseconds, each the mean over the ranks."""

    ms: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean step time; the phases of a step sum to it."""
        return sum(self.ms) / len(self.ms)

    @property
    def median(self) -> float:
        """The median step time."""
        return median(self.ms)


@dataclass(frozen=True)
class Graph:
    """A recorded run, ready to be replayed."""

    work: list[Work]
    threads: dict[int, Thread]
    barrier: bool
    """Whether the update waits for every exchange of its step; otherwise a unit's next forward waits for its own."""
    moves: list[tuple[int, Segment]]
    """Ranks, and segments of their training threads, split where work starts or is needed."""
    events: list[tuple[int, int, int]]
    """Time, kind, and index into `moves` or `work`."""


def build_graph(trace: Trace, *, ranks: Collection[int], steps: Collection[int]) -> Graph:
    """The graph of these steps, which all these ranks have. Ranks without steps (aggregators) are left out."""
    spans = [span for span in trace.spans if span.rank in ranks and span.step in steps]
    exchanges = [
        replace(one, members=tuple(member for member in one.members if member.rank in ranks))
        for one in trace.exchanges
        if one.step in steps
    ]
    work, own = split_background(spans, exchanges)
    by_rank: dict[int, list[Work]] = {rank: [] for rank in ranks}
    for one in work:
        by_rank[one.rank].append(one)
    blocked = any(span.lane == "wait" and span.name == BLOCKED for span in spans)
    threads = {rank: Thread(own[rank], by_rank[rank], blocked=blocked) for rank in ranks}
    barrier = has_barrier(work, threads)
    moves: list[tuple[int, Segment]] = []
    for rank, thread in threads.items():
        shares = ready_shares(by_rank[rank], thread)
        set_starts(by_rank[rank], thread, shares)
        needs = thread_needs(by_rank[rank], thread, shares, barrier=barrier)
        moments = {moment for one in by_rank[rank] for moment in one.moments}
        moves += [(rank, segment) for segment in _split(thread.segments, sorted(moments | set(needs)), needs)]
    events = [(segment.end, _THREAD, index) for index, (_, segment) in enumerate(moves)]
    events += [(one.start, _START, one.place) for one in work]
    events += [(one.end, _OVER if one.end > one.start else _EMPTY, one.place) for one in work]
    return Graph(work, threads, barrier, moves, sorted(events))


def _split(
    segments: Sequence[Segment], moments: Sequence[int], needs: Mapping[int, Sequence[int]]
) -> Iterator[Segment]:
    """The segments, split at these moments; stalls stay whole."""
    at = 0
    for segment in segments:
        start, inner = segment.start, []
        while at < len(moments) and moments[at] < segment.end:
            if moments[at] > start and segment.lane != STALL:
                inner.append(moments[at])
            at += 1
        for end in [*inner, segment.end]:
            yield replace(segment, start=start, end=end, needs=needs.get(end, ()))
            start = end


def run(
    graph: Graph,
    counted: Sequence[int],
    *,
    transfer: Callable[[Work], float] = lambda work: work.service,
    factors: Mapping[tuple[int, str, int], float] | None = None,
) -> StepTimes:
    """Replay everything; `counted` are the steps whose times are returned.

    `transfer` gives the nanoseconds of a transfer; `factors` by rank, lane and step change the lengths of other work.
    Without a change everything happens when it did, except where a rule of the graph delays it.
    """
    factors = factors or {}
    begins = {rank: thread.starts[0] for rank, thread in graph.threads.items()}
    origin = min(begins.values())  # a float cannot hold nanoseconds since 1970
    started, ended = [0.0] * len(graph.work), [0.0] * len(graph.work)
    now = {rank: float(begin - origin) for rank, begin in begins.items()}
    # When each thread reached each moment that others refer to: the ends of its moves, and its beginning.
    reached = {rank: {begin: now[rank]} for rank, begin in begins.items()}
    for time, kind, place in graph.events:
        if kind == _THREAD:
            rank, move = graph.moves[place]
            if move.blocker is not None:
                lag = move.end - max(move.start, move.blocker.end)
                at = max(now[rank], ended[move.blocker.place]) + lag
            else:
                at = now[rank] + (move.end - move.start) * factors.get((rank, move.lane, move.step), 1.0)
            for need in move.needs:
                at = max(at, ended[need])
            now[rank] = reached[rank][time] = at
            continue
        one = graph.work[place]
        if kind == _START:
            ready = [*(ended[other] for other in one.after), *(reached[one.rank][moment] for moment in one.moments)]
            started[place] = max(ready) + one.lag if ready else float(one.start - origin)
        elif one.lane != "exchange":
            ended[place] = started[place] + one.service * factors.get((one.rank, one.kind, one.step), 1.0)
        else:
            at = max([started[place], *(started[other.place] for other in one.joins)])
            if one.before is not None:
                at = max(at, ended[one.before.place])
            ended[place] = at + (transfer(one) if kind == _OVER else 0.0)
    return step_times(graph, counted, lambda rank, time: reached[rank][time])


def step_times(graph: Graph, counted: Sequence[int], at: Callable[[int, int], float]) -> StepTimes:
    """The times of these steps, where `at(rank, time)` is when a rank reaches a moment of the recording."""
    bounds = {rank: thread.bounds for rank, thread in graph.threads.items()}
    return StepTimes(
        tuple(
            mean([at(rank, of[step][1]) - at(rank, of[step][0]) for rank, of in bounds.items()]) / 1e6
            for step in counted
        )
    )
