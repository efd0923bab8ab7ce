"""What if, from the spans of any recorded run: what would a step take without the straggler, on another network?

The recorded run itself is replayed, rank by rank and step by step: the simulator of one typical rank (`simulate`) knows
no late ranks and no strategies but the engine's and DDP's. What is changed is the length of some spans; who waits for
whom stays as it was seen.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.errors import UsageError, unknown
from syncline.sim.network import Network, fit
from syncline.sim.replay.graph import Graph, graph
from syncline.sim.replay.late_ranks import even
from syncline.sim.replay.run import Steps, measured, run
from syncline.sim.replay.thread import STALL
from syncline.sim.replay.work import Work
from syncline.trace.span import STEP, Span

FEWEST = 3
"""Steps that a replay needs, beside the one that it starts from."""
_COMPUTE = frozenset({"forward", "backward", "update"})
_FACTOR = re.compile(r"(?:bandwidth=)?((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)x", re.IGNORECASE)
_LEAST, _MOST = 1e-9, 1e9  # times the bandwidth


@dataclass(frozen=True)
class Answer:
    """What a step would take, in milliseconds; `gain_ms` against the recorded run, both medians."""

    what: str
    steps: Steps
    gain_ms: float
    says: str


class Replay:
    """A recorded run that can be asked."""

    def __init__(self, spans: Sequence[Span], *, first: int) -> None:
        """`first`: the first step that counts; the one before it is replayed, too, where there is one."""
        common = _common(spans)
        self.counted = tuple(step for step in common if step >= first)
        if len(self.counted) < FEWEST:
            raise UsageError(
                f"{len(self.counted)} steady steps are in every rank's trace and {FEWEST} are needed: trace more steps"
            )
        earlier = [step for step in common if step < self.counted[0]]
        kept = {*self.counted, *earlier[-1:]}
        self.graph: Graph = graph(_from_zero([span for span in spans if span.step in kept]))
        self.measured = measured(self.graph, self.counted)
        if not self.measured.median:
            raise UsageError("the steps of the trace take no time, so it cannot be replayed: record it again")
        self.same = run(self.graph, self.counted)
        self._together = Counter(work.stretch for work in self.graph.work if work.lane == "exchange" and work.bytes)
        self.network, self.notes = _network(self.graph)
        self.modelled = run(self.graph, self.counted, transfer=self._modelled)

    @property
    def ranks(self) -> int:
        """How many ranks have steps in the trace."""
        return len(self.graph.threads)

    @property
    def error(self) -> float:
        """Of replaying the run with transfers of latency + bytes / bandwidth: predicted over measured step, less 1.

        With each transfer as long as it was, the replay is the recording, and its error would say nothing.
        """
        return self.modelled.median / self.measured.median - 1

    def ask(self, what: str) -> Answer:
        """The answer to one of `QUESTIONS`, or to `4x`: so many times the bandwidth."""
        factor = _FACTOR.fullmatch(what.strip())
        if factor:
            steps, says = self._bandwidth(float(factor[1]))
        elif what in QUESTIONS:
            steps, says = QUESTIONS[what](self)
        else:
            raise unknown("question", what, (*QUESTIONS, "2x"))
        return Answer(what, steps, self.same.median - steps.median, says)

    def _bandwidth(self, factor: float) -> tuple[Steps, str]:
        if not _LEAST <= factor <= _MOST:
            raise UsageError(f"{factor:g}x the bandwidth: name a factor above 0, {_LEAST:g} to {_MOST:g}, such as 2x")
        steps = run(self.graph, self.counted, transfer=lambda work: work.service * self._share(work, factor))
        return steps, f"{factor:g}x the bandwidth, the same latency"

    def _modelled(self, work: Work) -> float:
        latency, wire = self._parts(work)
        return latency + wire if work.bytes else work.service

    def _share(self, work: Work, factor: float) -> float:
        """Of a transfer's time, what is left with so many times the bandwidth."""
        latency, wire = self._parts(work)
        return (latency + wire / factor) / (latency + wire) if latency + wire else 1 / factor

    def _parts(self, work: Work) -> tuple[float, float]:
        """A transfer's latency, of which those that overlap have one together, and its bytes' time on the wire."""
        return self.network.latency / max(1, self._together[work.stretch]), work.bytes / self.network.bytes_per_s


def _infinite(replay: Replay) -> tuple[Steps, str]:
    steps = run(replay.graph, replay.counted, transfer=lambda work: 0.0)
    return steps, "transfers take no time; late ranks are still waited for"


def _no_straggler(replay: Replay) -> tuple[Steps, str]:
    change, excess = even(replay.graph)
    steps = run(replay.graph, replay.counted, length=change)
    if not excess:
        return steps, "no rank is slower than the typical one"
    (rank, lane), ms = max(excess.items(), key=lambda item: item[1])
    return steps, f"every rank as fast as the typical one; rank {rank} is {ms:.1f} ms a step slower in {lane}"


def _perfect(replay: Replay) -> tuple[Steps, str]:
    """In each step the most that a rank computes, or its wire is busy; never more than the replay itself."""
    busy: dict[tuple[int, int], float] = {}
    wire: dict[tuple[int, int], float] = {}
    for rank, thread in replay.graph.threads.items():
        for (step, lane), pieces in thread.of.items():
            if lane != STALL:
                busy[rank, step] = busy.get((rank, step), 0.0) + sum(p.end - p.start for p in pieces)
    for work in replay.graph.work:
        if work.lane == "exchange":
            wire[work.rank, work.step] = wire.get((work.rank, work.step), 0.0) + work.service
    ranks = list(replay.graph.threads)
    rows = []
    for step, same in zip(replay.counted, replay.same.ms, strict=True):
        most = max(max(busy.get((r, step), 0.0), wire.get((r, step), 0.0)) for r in ranks)
        rows.append(min(same, most / 1e6))
    return Steps(tuple(rows)), "the bound: the slowest rank's compute, or the busiest wire"


QUESTIONS: Mapping[str, Callable[[Replay], tuple[Steps, str]]] = {
    "no-straggler": _no_straggler,
    "infinite-network": _infinite,
    "perfect-overlap": _perfect,
}
"""What can be asked of any trace, beside `2x`, `bandwidth=0.5x` and so on."""


def _common(spans: Sequence[Span]) -> list[int]:
    """The steps that every rank has which has any."""
    seen: dict[int, set[int]] = {}
    for span in spans:
        if span.lane == STEP:
            seen.setdefault(span.rank, set()).add(span.step)
    if not seen:
        raise UsageError("the trace holds no steps, so it cannot be replayed: record whole training steps")
    if not any(span.lane in _COMPUTE for span in spans):
        raise UsageError("the trace holds no compute, so it cannot be replayed: record forward and backward, too")
    return sorted(set.intersection(*seen.values()))


def _from_zero(spans: Sequence[Span]) -> list[Span]:
    """Times from the first one on: nanoseconds of a calendar are too many digits for a float."""
    origin = min(span.start for span in spans)
    return [replace(span, start=span.start - origin, end=span.end - origin) for span in spans]


def _network(made: Graph) -> tuple[Network, tuple[str, ...]]:
    """Latency and bandwidth as the transfers show them, in nanoseconds; those that overlap count as one."""
    sizes: dict[int, float] = {}
    times: dict[int, float] = {}
    for work in made.work:
        if work.lane == "exchange" and work.bytes:
            sizes[work.stretch] = sizes.get(work.stretch, 0.0) + work.bytes
            times[work.stretch] = times.get(work.stretch, 0.0) + work.service
    if not sizes:
        # Without bytes the whole of a transfer is taken for bytes on the wire.
        some = any(work.lane == "exchange" for work in made.work)
        return Network(0.0, 1.0), ("the trace tells no bytes: all of a transfer scales with the bandwidth",) * some
    single = len(set(sizes.values())) == 1
    note = "all messages are of one size, which hides their latency: all of a transfer scales with the bandwidth"
    return fit([(sizes[n], times[n]) for n in sizes]), (note,) * single
