"""Late ranks: the ranks that others waited for in exchanges, the cost of that, and the work that delayed them."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.stats import median_or_zero, winsorized_mean
from syncline.trace.analysis.steps import Prepared
from syncline.trace.merge.exchanges import Exchange
from syncline.trace.span import PHASES

_CAUSES = tuple(phase for phase in PHASES if phase != "wait")


@dataclass(frozen=True)
class LateRank:
    """A rank that others waited for: `wait_ms` per step on each of them, `share` of all such waits.

    excess: by phase, how much longer than the others it took before it joined. gains: for each steady step, the time
    that all other ranks waited; without the delay the step would be that much shorter.
    """

    rank: int
    share: float
    wait_ms: float
    excess: dict[str, float]
    gains: tuple[float, ...]

    @property
    def doing(self) -> str | None:
        """The phase that it was in while the others waited."""
        phase = max(self.excess, key=lambda phase: self.excess[phase], default=None)
        return phase if phase is not None and self.excess[phase] > 0 else None

    def as_json(self) -> dict[str, object]:
        """As in the analysis."""
        return {"rank": self.rank, "share": self.share, "wait_ms": self.wait_ms, "doing": self.doing}


def late_ranks(trace: Prepared, steps: Sequence[int]) -> tuple[LateRank, ...]:
    """The ranks that others waited for in these steps, the most expensive first."""
    kept = set(steps)
    totals: dict[int, float] = defaultdict(float)
    waits: dict[tuple[int, int, int], float] = defaultdict(float)  # late rank, waiting rank, step: nanoseconds
    for exchange in trace.exchanges:
        step = _counts_in(exchange.step, trace, kept)
        if step is not None:
            for member in exchange.members:
                exposed = trace.exposed_ns(member.wait)
                late = exchange.late_rank(member) if exposed else None
                if late is not None:
                    waits[late, member.rank, step] += exposed
                    totals[late] += exposed
    whole = sum(totals.values())
    excess = _excess(trace, kept) if trace.has_compute else {}
    result = []
    for late in sorted(totals, key=lambda rank: -totals[rank]):
        others = [rank for rank in trace.ranks if rank != late]
        gains = tuple(min((waits[late, rank, step] for rank in others), default=0.0) / 1e6 for step in steps)
        each = totals[late] / 1e6 / max(1, len(others)) / max(1, len(steps))
        result.append(LateRank(late, totals[late] / whole, each, excess.get(late, {}), gains))
    return tuple(result)


def _counts_in(step: int, trace: Prepared, kept: set[int]) -> int | None:
    """The step in which an exchange's waits count: if its own was not sampled, the next one, which it reaches into."""
    if step in kept:
        return step
    return step + 1 if step + 1 in kept and step not in trace.bounds[trace.ranks[0]] else None


def _excess(trace: Prepared, kept: set[int]) -> dict[int, dict[str, float]]:
    """By late rank and phase: ms per step that it took longer than the others since all ranks were last together.

    Ranks were together when the last one joined an exchange. From there until it joins the next exchange, each rank's
    time consists of phases, so the differences of phases tell exactly why one joined later.
    """
    releases = [exchange.last_joined for exchange in trace.exchanges]
    latest: dict[tuple[int, int, int], Exchange] = {}
    for exchange in trace.exchanges:
        step = _counts_in(exchange.step, trace, kept)
        if step is None or len(exchange.members) < 2:
            continue
        first = min(member.joined for member in exchange.members)
        together = bisect_right(releases, first) - 1
        last = max(exchange.members, key=lambda member: member.joined)
        if last.joined == first or not any(trace.exposed_ns(member.wait) for member in exchange.members):
            continue
        # Exchanges after the same meeting have their waits at the same time: the last one covers all of it.
        latest[last.rank, together, step] = exchange
    values: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    for (rank, together, step), exchange in latest.items():
        begins = [trace.bounds[one][step][0] for one in trace.ranks if step in trace.bounds[one]]
        begin = releases[together] if together >= 0 else min(begins, default=exchange.last_joined)
        for phase, ms in _longer(trace, exchange, begin).items():
            values[rank][step][phase] += ms
    return {
        rank: {
            phase: winsorized_mean([of[step][phase] if step in of else 0.0 for step in sorted(kept)])
            for phase in _CAUSES
        }
        for rank, of in values.items()
    }


def _longer(trace: Prepared, exchange: Exchange, begin: int) -> dict[str, float]:
    """By phase: ms from `begin` until the last rank joined, minus the median of the other ranks."""
    last = max(exchange.members, key=lambda member: member.joined)
    spent = {
        member.rank: trace.timelines[member.rank].totals(begin, max(begin, member.joined))
        for member in exchange.members
    }
    mine = spent.pop(last.rank)
    return {phase: (mine[phase] - median_or_zero([of[phase] for of in spent.values()])) / 1e6 for phase in _CAUSES}
