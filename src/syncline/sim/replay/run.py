"""Replays a recorded run in one pass over its events, with some lengths changed; gives the new step times."""

from collections.abc import Callable
from dataclasses import dataclass

from syncline.sim.replay.background import Work
from syncline.sim.replay.graph import OVER, START, THREAD, Graph
from syncline.sim.replay.training_thread import STALL
from syncline.stats import median

Length = Callable[[int, str, int, float], float]
"""From rank, lane, step and recorded nanoseconds to the nanoseconds of the replay."""


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


def run(
    graph: Graph,
    counted: range | tuple[int, ...],
    *,
    transfer: Callable[[Work], float] = lambda work: work.service,
    length: Length = lambda rank, lane, step, ns: ns,
) -> StepTimes:
    """Replay everything; `counted` are the steps whose times are returned.

    Without a change everything happens when it did, except where a rule of the graph delays it.
    """
    work, moves, starts = graph.work, graph.moves, graph.starts
    started, ended = [0.0] * len(work), [0.0] * len(work)
    now = {rank: float(thread.segments[0].start) for rank, thread in graph.threads.items()}
    # When each thread reached each moment that others refer to: the ends of its moves, and its beginning.
    reached = {rank: {round(at): at} for rank, at in now.items()}
    for time, kind, place in graph.events:
        if kind == THREAD:
            move = moves[place]
            at = now[move.rank]
            if move.lane == STALL:
                at = max(at, ended[move.blocker]) + move.lag
            else:
                at += length(move.rank, move.lane, move.step, move.length)
            for need in move.needs:
                at = max(at, ended[need])
            now[move.rank] = reached[move.rank][time] = at
        elif kind == START:
            start, one = starts[place], work[place]
            ready = [ended[other] for other in start.after]
            ready += [reached[one.rank][moment] for moment in start.moments]
            started[place] = max(ready) + start.lag if ready else float(one.start)
        else:
            one = work[place]
            at = max([started[place], *(started[other] for other in graph.joins[place])])
            if one.lane != "exchange":
                ended[place] = at + length(one.rank, one.kind, one.step, one.end - one.start)
                continue
            if graph.before[place] >= 0:
                at = max(at, ended[graph.before[place]])
            ended[place] = at + (transfer(one) if kind == OVER else 0.0)
    return StepTimes(tuple(_step(graph, reached, step) for step in counted))


def measured(graph: Graph, counted: range | tuple[int, ...]) -> StepTimes:
    """The step times as they were recorded."""
    return StepTimes(
        tuple(
            sum(steps[step][1] - steps[step][0] for steps in graph.steps.values()) / len(graph.steps) / 1e6
            for step in counted
        )
    )


def _step(graph: Graph, reached: dict[int, dict[int, float]], step: int) -> float:
    total = 0.0
    for rank, steps in graph.steps.items():
        begin, end = steps[step]
        total += reached[rank][end] - reached[rank][begin]
    return total / len(graph.steps) / 1e6
