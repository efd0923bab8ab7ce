"""One pass over a recorded run's events with some of their lengths changed: when would each have happened?"""

from collections.abc import Callable
from dataclasses import dataclass

from syncline.sim.replay.graph import OVER, START, THREAD, Graph
from syncline.sim.replay.thread import STALL
from syncline.sim.replay.work import Work

Length = Callable[[int, str, int, float], float]
"""Of so many nanoseconds of a rank, a lane and a step: how many they would be."""


@dataclass(frozen=True)
class Steps:
    """Step times in milliseconds, each the mean over the ranks."""

    ms: tuple[float, ...]

    @property
    def mean(self) -> float:
        """What a step takes on average: the phases of a step sum to it."""
        return sum(self.ms) / len(self.ms)

    @property
    def median(self) -> float:
        """Half of the steps take longer."""
        ordered = sorted(self.ms)
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def run(
    graph: Graph,
    counted: range | tuple[int, ...],
    *,
    transfer: Callable[[Work], float] = lambda work: work.service,
    length: Length = lambda rank, lane, step, ns: ns,
) -> Steps:
    """Replay everything; `counted` are the steps whose times are told.

    Without a change everything happens when it did, but for what the graph holds back by a rule of its own.
    """
    work, moves, starts = graph.work, graph.moves, graph.starts
    begun, over = [0.0] * len(work), [0.0] * len(work)
    now = {rank: float(thread.pieces[0].start) for rank, thread in graph.threads.items()}
    # When each thread came to each moment that something refers to: the ends of its moves, and its beginning.
    came = {rank: {round(at): at} for rank, at in now.items()}
    for time, kind, place in graph.events:
        if kind == THREAD:
            move = moves[place]
            at = now[move.rank]
            if move.lane == STALL:
                at = max(at, over[move.blocker]) + move.lag
            else:
                at += length(move.rank, move.lane, move.step, move.length)
            for need in move.needs:
                at = max(at, over[need])
            now[move.rank] = came[move.rank][time] = at
        elif kind == START:
            start, one = starts[place], work[place]
            ready = [over[other] for other in start.after]
            ready += [came[one.rank][moment] for moment in start.moments]
            begun[place] = max(ready) + start.lag if ready else float(one.start)
        else:
            one = work[place]
            at = max([begun[place], *(begun[other] for other in graph.joins[place])])
            if one.lane != "exchange":
                over[place] = at + length(one.rank, one.kind, one.step, one.end - one.start)
                continue
            if graph.before[place] >= 0:
                at = max(at, over[graph.before[place]])
            over[place] = at + (transfer(one) if kind == OVER else 0.0)
    return Steps(tuple(_step(graph, came, step) for step in counted))


def measured(graph: Graph, counted: range | tuple[int, ...]) -> Steps:
    """The step times as they were recorded."""
    return Steps(
        tuple(
            sum(steps[step][1] - steps[step][0] for steps in graph.steps.values()) / len(graph.steps) / 1e6
            for step in counted
        )
    )


def _step(graph: Graph, came: dict[int, dict[int, float]], step: int) -> float:
    total = 0.0
    for rank, steps in graph.steps.items():
        begin, end = steps[step]
        total += came[rank][end] - came[rank][begin]
    return total / len(graph.steps) / 1e6
