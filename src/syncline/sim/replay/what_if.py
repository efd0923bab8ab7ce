"""What-if questions about a recorded run: the step time without the straggler, or on another network.

The recorded run itself is replayed, rank by rank and step by step. (The simulator of one typical rank, `simulate`,
knows no late ranks, and no strategies except the engine's and DDP's.) The lengths of some spans change; who waits for
whom stays as recorded.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.errors import UsageError, unknown
from syncline.sim.network import Network, fit
from syncline.sim.replay.background import Work
from syncline.sim.replay.graph import Graph, build_graph
from syncline.sim.replay.run import Length, StepTimes, measured, run
from syncline.sim.replay.training_thread import STALL
from syncline.trace.merge.exchanges import Exchange, Member
from syncline.trace.merge.merge import Trace
from syncline.trace.span import COMPUTE_LANES, STEP, Span

FEWEST = 3
"""The least number of steps for a replay, besides the one that it starts from."""
_FACTOR = re.compile(r"(?:bandwidth=)?((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)x", re.IGNORECASE)
_LEAST, _MOST = 1e-9, 1e9  # times the bandwidth


@dataclass(frozen=True)
class Answer:
    """The step times under a changed condition; `gain_ms` is the difference of medians to the recorded run."""

    what: str
    steps: StepTimes
    gain_ms: float
    says: str


class Replay:
    """A recorded run that answers what-if questions."""

    def __init__(self, trace: Trace, *, first: int) -> None:
        """`first`: the first step that counts; the step before it is replayed too, if there is one."""
        common = _common_steps(trace.spans)
        self.counted = tuple(step for step in common if step >= first)
        if len(self.counted) < FEWEST:
            raise UsageError(
                f"{len(self.counted)} steady steps are in every rank's trace and {FEWEST} are needed: trace more steps"
            )
        earlier = [step for step in common if step < self.counted[0]]
        kept = {*self.counted, *earlier[-1:]}
        self.graph: Graph = build_graph(*_selected(trace, kept))
        self.measured = measured(self.graph, self.counted)
        if not self.measured.median:
            raise UsageError("the steps of the trace take no time, so it cannot be replayed: record it again")
        self.same = run(self.graph, self.counted)
        self._overlapping = Counter(
            work.busy_period for work in self.graph.work if work.lane == "exchange" and work.bytes
        )
        self.network, self.notes = _network(self.graph)
        self.modelled = run(self.graph, self.counted, transfer=self._modelled)

    @property
    def ranks(self) -> int:
        """The number of ranks that have steps in the trace."""
        return len(self.graph.threads)

    @property
    def error(self) -> float:
        """The error of a replay in which each transfer takes latency + bytes / bandwidth: predicted / measured - 1.

        With recorded transfer times the replay equals the recording, and its error would say nothing.
        """
        return self.modelled.median / self.measured.median - 1

    def ask(self, what: str) -> Answer:
        """The answer to one of `QUESTIONS`, or to a factor of the bandwidth such as `4x`."""
        factor = _FACTOR.fullmatch(what.strip())
        if factor:
            steps, says = self._bandwidth(float(factor[1]))
        elif what in QUESTIONS:
            steps, says = QUESTIONS[what](self)
        else:
            raise unknown("question", what, (*QUESTIONS, "2x"))
        return Answer(what, steps, self.same.median - steps.median, says)

    def _bandwidth(self, factor: float) -> tuple[StepTimes, str]:
        if not _LEAST <= factor <= _MOST:
            raise UsageError(f"{factor:g}x the bandwidth: name a factor above 0, {_LEAST:g} to {_MOST:g}, such as 2x")
        steps = run(self.graph, self.counted, transfer=lambda work: work.service * self._share(work, factor))
        return steps, f"{factor:g}x the bandwidth, the same latency"

    def _modelled(self, work: Work) -> float:
        latency, moving = self._parts(work)
        return latency + moving if work.bytes else work.service

    def _share(self, work: Work, factor: float) -> float:
        """The share of a transfer's time that is left with `factor` times the bandwidth."""
        latency, moving = self._parts(work)
        return (latency + moving / factor) / (latency + moving) if latency + moving else 1 / factor

    def _parts(self, work: Work) -> tuple[float, float]:
        """A transfer's latency, which overlapping transfers share, and the time of its bytes on the network."""
        return self.network.latency / max(1, self._overlapping[work.busy_period]), work.bytes / self.network.bytes_per_s


def _infinite(replay: Replay) -> tuple[StepTimes, str]:
    steps = run(replay.graph, replay.counted, transfer=lambda work: 0.0)
    return steps, "transfers take no time; ranks still wait for late ranks"


def _no_straggler(replay: Replay) -> tuple[StepTimes, str]:
    change, excess = _without_stragglers(replay.graph)
    steps = run(replay.graph, replay.counted, length=change)
    if not excess:
        return steps, "no rank is slower than the typical one"
    (rank, lane), ms = max(excess.items(), key=lambda item: item[1])
    return steps, f"every rank as fast as the typical one; rank {rank} is {ms:.1f} ms per step slower in {lane}"


def _without_stragglers(graph: Graph) -> tuple[Length, dict[tuple[int, str], float]]:
    """Lengths for a replay without stragglers, and by (rank, lane) how many milliseconds per step they are shorter.

    In each lane the typical rank is the median one by its mean, of two the faster. A slower rank's longest step gets
    the length of the typical rank's longest, its second longest that of the second longest, and so on: jitter stays,
    and a delay in only some steps is removed like a delay in all of them.
    """
    totals: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: {rank: {} for rank in graph.threads})
    counted = sorted(set.intersection(*(set(steps) for steps in graph.steps.values())))
    wanted = set(counted)
    for rank, thread in graph.threads.items():
        for (step, lane), segments in thread.of.items():
            if lane != STALL and step in wanted:
                totals[lane][rank][step] = sum(s.end - s.start for s in segments)
    for work in graph.work:
        if work.lane != "exchange" and work.step in wanted:
            row = totals[work.kind][work.rank]
            row[work.step] = row.get(work.step, 0) + work.end - work.start
    factors: dict[tuple[int, str, int], float] = {}
    excess: dict[tuple[int, str], float] = {}
    for lane, ranks in totals.items():
        rows = {rank: [row.get(step, 0) for step in counted] for rank, row in ranks.items()}
        by_mean = sorted(rows, key=lambda rank: (sum(rows[rank]), rank))
        typical = by_mean[(len(by_mean) - 1) // 2]
        target = sorted(rows[typical])
        for rank in by_mean[by_mean.index(typical) + 1 :]:
            order = sorted(range(len(counted)), key=lambda n: (rows[rank][n], n))
            saved = 0
            for place, n in enumerate(order):
                was = rows[rank][n]
                if was > target[place]:
                    factors[rank, lane, counted[n]] = target[place] / was
                    saved += was - target[place]
            if saved:
                excess[rank, lane] = saved / len(counted) / 1e6

    def length(rank: int, lane: str, step: int, ns: float) -> float:
        return ns * factors.get((rank, lane, step), 1.0)

    return length, excess


def _perfect(replay: Replay) -> tuple[StepTimes, str]:
    """In each step the longest compute or network time of a rank; never more than the replay itself."""
    busy: dict[tuple[int, int], float] = {}
    network: dict[tuple[int, int], float] = {}
    for rank, thread in replay.graph.threads.items():
        for (step, lane), segments in thread.of.items():
            if lane != STALL:
                busy[rank, step] = busy.get((rank, step), 0.0) + sum(s.end - s.start for s in segments)
    for work in replay.graph.work:
        if work.lane == "exchange":
            network[work.rank, work.step] = network.get((work.rank, work.step), 0.0) + work.service
    ranks = list(replay.graph.threads)
    rows = []
    for step, same in zip(replay.counted, replay.same.ms, strict=True):
        most = max(max(busy.get((r, step), 0.0), network.get((r, step), 0.0)) for r in ranks)
        rows.append(min(same, most / 1e6))
    return StepTimes(tuple(rows)), "the bound: the slowest rank's compute, or the longest time on the network"


QUESTIONS: Mapping[str, Callable[[Replay], tuple[StepTimes, str]]] = {
    "no-straggler": _no_straggler,
    "infinite-network": _infinite,
    "perfect-overlap": _perfect,
}
"""Questions about any trace, besides `2x`, `bandwidth=0.5x` and so on."""


def _common_steps(spans: Sequence[Span]) -> list[int]:
    """The steps that are on every rank that has steps."""
    seen: dict[int, set[int]] = {}
    for span in spans:
        if span.lane == STEP:
            seen.setdefault(span.rank, set()).add(span.step)
    if not seen:
        raise UsageError("the trace holds no steps, so it cannot be replayed: record whole training steps")
    if not any(span.lane in COMPUTE_LANES for span in spans):
        raise UsageError("the trace holds no compute, so it cannot be replayed: record forward and backward too")
    return sorted(set.intersection(*seen.values()))


def _selected(trace: Trace, steps: set[int]) -> tuple[list[Span], list[Exchange]]:
    """Spans and exchanges of these steps, with times from the first span on: a float cannot hold times since 1970."""
    origin = min(span.start for span in trace.spans if span.step in steps)

    def shifted(span: Span) -> Span:
        return replace(span, start=span.start - origin, end=span.end - origin)

    def member(one: Member) -> Member:
        return Member(one.wait and shifted(one.wait), one.transfer and shifted(one.transfer))

    exchanges = [
        Exchange(one.name, one.unit, one.step, tuple(member(each) for each in one.members))
        for one in trace.exchanges
        if one.step in steps
    ]
    return [shifted(span) for span in trace.spans if span.step in steps], exchanges


def _network(made: Graph) -> tuple[Network, tuple[str, ...]]:
    """Latency and bandwidth from the transfers, in nanoseconds; overlapping transfers count as one."""
    sizes: dict[int, float] = {}
    times: dict[int, float] = {}
    for work in made.work:
        if work.lane == "exchange" and work.bytes:
            sizes[work.busy_period] = sizes.get(work.busy_period, 0.0) + work.bytes
            times[work.busy_period] = times.get(work.busy_period, 0.0) + work.service
    if not sizes:
        # Without bytes, all the time of a transfer is taken to depend on the bandwidth.
        some = any(work.lane == "exchange" for work in made.work)
        return Network(0.0, 1.0), (
            "the trace has no sizes of messages: all of a transfer scales with the bandwidth",
        ) * some
    single = len(set(sizes.values())) == 1
    note = "all messages have one size, which hides their latency: all of a transfer scales with the bandwidth"
    return fit([(sizes[n], times[n]) for n in sizes]), (note,) * single
