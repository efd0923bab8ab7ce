"""What-if questions about a recorded run: the step time without the straggler, or on another network.

The recorded run itself is replayed, rank by rank and step by step. (The simulator of one typical rank, `simulate`,
knows no late ranks, and no strategies except the engine's and DDP's.) The lengths of some spans change; who waits for
whom stays as recorded.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import UsageError, unknown
from syncline.sim.network import Network, fit
from syncline.sim.replay.background import Work
from syncline.sim.replay.graph import Graph, StepTimes, build_graph, run, step_times
from syncline.sim.replay.training_thread import STALL
from syncline.trace.merge.merge_ranks import Trace
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
        ranks, common = _common_steps(trace.spans)
        self.ranks = len(ranks)
        self.counted = tuple(step for step in common if step >= first)
        if len(self.counted) < FEWEST:
            raise UsageError(
                f"{len(self.counted)} steady steps are in every rank's trace and {FEWEST} are needed: trace more steps"
            )
        earlier = [step for step in common if step < self.counted[0]]
        self.graph: Graph = build_graph(trace, ranks=ranks, steps={*self.counted, *earlier[-1:]})
        self.measured = step_times(self.graph, self.counted, lambda rank, time: time)
        if not self.measured.median:
            raise UsageError("the steps of the trace take no time, so it cannot be replayed: record it again")
        self.same = run(self.graph, self.counted)
        self._overlapping = Counter(
            work.busy_period for work in self.graph.work if work.lane == "exchange" and work.bytes
        )
        self.network, self.notes = _network(self.graph)
        self.modelled = run(self.graph, self.counted, transfer=self._modelled)

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


def _no_straggler(replay: Replay) -> tuple[StepTimes, str]:
    factors, excess = _without_stragglers(replay.graph)
    steps = run(replay.graph, replay.counted, factors=factors)
    if not excess:
        return steps, "no rank is slower than the typical one"
    (rank, lane), ms = max(excess.items(), key=lambda item: item[1])
    return steps, f"every rank as fast as the typical one; rank {rank} is {ms:.1f} ms per step slower in {lane}"


def _without_stragglers(graph: Graph) -> tuple[dict[tuple[int, str, int], float], dict[tuple[int, str], float]]:
    """Factors for a replay without stragglers, and by (rank, lane) how many milliseconds per step they save.

    In each lane the typical rank is the median one by its mean, of two the faster. A slower rank's longest step gets
    the length of the typical rank's longest, its second longest that of the second longest, and so on: jitter stays,
    and a delay in only some steps is removed like a delay in all of them.
    """
    totals = _thread_times(graph)
    for work in graph.work:
        if work.lane != "exchange":
            totals[work.kind][work.rank, work.step] += work.service
    counted = sorted(set.intersection(*(set(thread.bounds) for thread in graph.threads.values())))
    factors: dict[tuple[int, str, int], float] = {}
    excess: dict[tuple[int, str], float] = {}
    for lane, times in totals.items():
        rows = {rank: sorted((times[rank, step], step) for step in counted) for rank in graph.threads}
        by_mean = sorted(rows, key=lambda rank: (sum(ns for ns, _ in rows[rank]), rank))
        middle = (len(by_mean) - 1) // 2
        for rank in by_mean[middle + 1 :]:
            saved = 0
            for (ns, step), (typical, _) in zip(rows[rank], rows[by_mean[middle]], strict=True):
                if ns > typical:
                    factors[rank, lane, step] = typical / ns
                    saved += ns - typical
            if saved:
                excess[rank, lane] = saved / len(counted) / 1e6
    return factors, excess


def _perfect(replay: Replay) -> tuple[StepTimes, str]:
    """In each step the longest compute or network time of a rank; never more than the replay itself."""
    busy: Counter[tuple[int, int]] = sum(_thread_times(replay.graph).values(), Counter())
    network: Counter[tuple[int, int]] = Counter()
    for work in replay.graph.work:
        if work.lane == "exchange":
            network[work.rank, work.step] += work.service
    rows = []
    for step, same in zip(replay.counted, replay.same.ms, strict=True):
        most = max(max(busy[rank, step], network[rank, step]) for rank in replay.graph.threads)
        rows.append(min(same, most / 1e6))
    return StepTimes(tuple(rows)), "the bound: the slowest rank's compute, or the longest time on the network"


def _thread_times(graph: Graph) -> dict[str, Counter[tuple[int, int]]]:
    """By lane: the nanoseconds of a rank's training thread in a step, without stalls."""
    totals: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for rank, thread in graph.threads.items():
        for (step, lane), segments in thread.of.items():
            if lane != STALL:
                totals[lane][rank, step] = sum(s.end - s.start for s in segments)
    return totals


QUESTIONS: Mapping[str, Callable[[Replay], tuple[StepTimes, str]]] = {
    "no-straggler": _no_straggler,
    "infinite-network": lambda replay: (
        run(replay.graph, replay.counted, transfer=lambda work: 0.0),
        "transfers take no time; ranks still wait for late ranks",
    ),
    "perfect-overlap": _perfect,
}
"""Questions about any trace, besides `2x`, `bandwidth=0.5x` and so on."""


def _common_steps(spans: Sequence[Span]) -> tuple[set[int], list[int]]:
    """The ranks that have steps, and the steps that all of these have."""
    seen: dict[int, set[int]] = defaultdict(set)
    ended: dict[int, int] = {}
    for span in sorted((span for span in spans if span.lane == STEP), key=lambda span: span.start):
        if span.start < ended.get(span.rank, span.start):
            raise UsageError(
                f"steps of rank {span.rank} overlap at step {span.step}: the trace is damaged, record it again"
            )
        ended[span.rank] = span.end
        seen[span.rank].add(span.step)
    if not seen:
        raise UsageError("the trace holds no steps, so it cannot be replayed: record whole training steps")
    if not any(span.lane in COMPUTE_LANES for span in spans):
        raise UsageError("the trace holds no compute, so it cannot be replayed: record forward and backward too")
    return set(seen), sorted(set.intersection(*seen.values()))


def _network(graph: Graph) -> tuple[Network, tuple[str, ...]]:
    """Latency and bandwidth from the transfers, in nanoseconds; overlapping transfers count as one."""
    sizes: Counter[int] = Counter()
    times: Counter[int] = Counter()
    exchanges = [work for work in graph.work if work.lane == "exchange"]
    for work in exchanges:
        if work.bytes:
            sizes[work.busy_period] += work.bytes
            times[work.busy_period] += work.service
    scales = "all of a transfer scales with the bandwidth"
    if not sizes:
        return Network(0.0, 1.0), (f"the trace has no sizes of messages: {scales}",) if exchanges else ()
    single = len(set(sizes.values())) == 1
    note = f"all messages have one size, which hides their latency: {scales}"
    return fit([(sizes[n], times[n]) for n in sizes]), (note,) if single else ()
