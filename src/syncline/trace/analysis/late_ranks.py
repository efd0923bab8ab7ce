"""Late ranks: the ranks that others waited for in exchanges, the cost of that, and the work that delayed them.

A rank that is late because it waited for another one itself is not to blame: its part of the delay goes to the rank at
the end of that chain. Ranks that are late together, such as those of a slow host, are one straggler.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.stats import mean_or_zero, median_or_zero
from syncline.trace.analysis.steps import Prepared
from syncline.trace.merge.exchanges import Exchange
from syncline.trace.span import PHASES, rank_list

SHARE = 0.65
"""A straggler has at least this share of all waits; with less, ranks wait for one another in turn."""

_CAUSES = tuple(phase for phase in PHASES if phase != "wait")
_EXPLAINED = 4  # late ranks, the most expensive ones, for which it is computed what they were doing
_NEARLY = 0.8  # of the largest gain: fewer ranks that explain this much are named instead

_Wait = tuple[int, int, int]  # start, end, late rank
_Waits = Mapping[int, Mapping[tuple[int, int], float]]  # by late rank, by step and waiting rank: nanoseconds


@dataclass(frozen=True)
class LateRanks:
    """Ranks that others waited for, one or several: `wait_ms` per step on each other rank, `share` of all such waits.

    excess: by phase, how much longer than the others they took before they joined. gains: for each steady step, the
    time that all other ranks waited; without the delay the step would be that much shorter.
    """

    ranks: tuple[int, ...]
    share: float
    wait_ms: float
    excess: dict[str, float]
    gains: tuple[float, ...]
    where: str = ""
    """What several ranks have in common: their host or their process group."""

    @property
    def rank(self) -> int:
        """The first of them."""
        return self.ranks[0]

    @property
    def doing(self) -> str | None:
        """The phase that they were in while the others waited."""
        phase = max(self.excess, key=lambda phase: self.excess[phase], default=None)
        return phase if phase is not None and self.excess[phase] > 0 else None

    @property
    def name(self) -> str:
        """As sentences name them: `rank 1`, or `ranks 2-3 (host b)`."""
        if len(self.ranks) == 1:
            return f"rank {self.rank}"
        return f"ranks {rank_list(self.ranks)}" + (f" ({self.where})" if self.where else "")

    def as_json(self) -> dict[str, object]:
        """As in the analysis."""
        return {
            "rank": self.rank,
            "ranks": list(self.ranks),
            "where": self.where,
            "share": self.share,
            "wait_ms": self.wait_ms,
            "doing": self.doing,
        }


def late_ranks(
    trace: Prepared, steps: Sequence[int], *, hosts: Mapping[int, str] | None = None
) -> tuple[tuple[LateRanks, ...], LateRanks | None]:
    """The ranks that others waited for in these steps, the most expensive first; and the straggler, if there is one.

    `hosts`: by rank, the name of its host.
    """
    kept = set(steps)
    waits = _blamed(trace, kept)
    connected = _connected(trace, kept)

    def late(ranks: tuple[int, ...], where: str = "") -> LateRanks:
        others = sorted(connected[ranks[0]] - set(ranks))
        by_step = [[sum(waits[one][step, other] for one in ranks) for other in others] for step in steps]
        own = sum(map(sum, by_step))
        gains = tuple(min(of, default=0.0) / 1e6 for of in by_step)
        each = own / 1e6 / max(1, len(others)) / max(1, len(steps))
        return LateRanks(ranks, own / whole, each, {}, gains, where)

    def explained(one: LateRanks) -> LateRanks:
        return replace(one, excess=_excess(trace, kept, one.ranks)) if trace.has_compute else one

    totals = {rank: sum(of.values()) for rank, of in waits.items()}
    whole = sum(totals.values()) or 1.0
    order = sorted(totals, key=lambda rank: -totals[rank])
    single = [late((rank,)) for rank in order]
    candidates = [one for one in single if one.share >= SHARE]
    for ranks, where in _groups(trace, order, hosts or {}).items():
        together = ranks[0] in connected and len(ranks) <= len(connected[ranks[0]]) / 2
        if together and sum(totals.get(rank, 0.0) for rank in ranks) >= SHARE * whole:
            one = late(ranks, where)
            candidates += [one] if one.share >= SHARE else []
    most = max((mean_or_zero(one.gains) for one in candidates), default=0.0)
    enough = [one for one in candidates if mean_or_zero(one.gains) >= _NEARLY * most]
    straggler = min(enough, key=lambda one: (len(one.ranks), not one.where, -one.share), default=None)
    shown = [explained(one) if place < _EXPLAINED else one for place, one in enumerate(single)]
    return tuple(shown), None if straggler is None else explained(straggler)


def _blamed(trace: Prepared, kept: set[int]) -> _Waits:
    """All visible waits of these steps, each counted for the rank at the end of its chain."""
    by_rank: dict[int, list[_Wait]] = defaultdict(list)
    found: list[tuple[int, int, _Wait]] = []
    for exchange in trace.exchanges:
        for member in exchange.members:
            exposed = round(trace.exposed_ns(member.wait))
            late = exchange.late_rank(member) if exposed else None
            if late is None or member.wait is None:
                continue
            # Compute hides the start of a wait: a thread that is blocked stays so until the wait ends.
            wait = member.wait.end - exposed, member.wait.end, late
            by_rank[member.rank].append(wait)
            step = _counts_in(exchange.step, trace, kept)
            if step is not None:
                found.append((member.rank, step, wait))
    for of in by_rank.values():
        of.sort()
    waits: dict[int, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    for waiting, step, (start, end, late) in found:
        for culprit, ns in _culprits(by_rank, late, start, end, frozenset({waiting, late})):
            waits[culprit][step, waiting] += ns
    return waits


def _culprits(
    waits: Mapping[int, Sequence[_Wait]], rank: int, start: int, end: int, seen: frozenset[int]
) -> Iterator[tuple[int, int]]:
    """Who made `rank` late between two times, and for how long: the ranks that it waited for, and itself."""
    left = end - start
    mine = waits.get(rank, ())
    for begin, until, late in mine[max(0, bisect_right(mine, (start,)) - 1) :]:
        if begin >= end:
            break
        begin, until = max(begin, start), min(until, end)
        if until > begin and late not in seen:
            yield from _culprits(waits, late, begin, until, seen | {late})
            left -= until - begin
    if left > 0:
        yield rank, left


def _connected(trace: Prepared, kept: set[int]) -> dict[int, frozenset[int]]:
    """By rank: the ranks that its delay can reach, through exchanges of any process group."""
    sets: dict[int, frozenset[int]] = {rank: frozenset({rank}) for rank in trace.spans}
    for members in {frozenset(exchange.joined) for exchange in trace.exchanges if exchange.step in kept}:
        joined = frozenset().union(*(sets.get(rank, frozenset({rank})) for rank in members))
        sets |= dict.fromkeys(joined, joined)
    # Aggregators have no steps that a delay could make longer.
    return {rank: of & (set(trace.ranks) | {rank}) for rank, of in sets.items()}


def _groups(trace: Prepared, order: Sequence[int], hosts: Mapping[int, str]) -> dict[tuple[int, ...], str]:
    """Sets of ranks that may be late together, with what they have in common: a host, a process group, or nothing."""
    found: dict[tuple[int, ...], str] = {}
    for host in dict.fromkeys(hosts.values()):
        found[tuple(sorted(rank for rank, name in hosts.items() if name == host))] = f"host {host}"
    for exchange in trace.exchanges:
        if exchange.group:
            found.setdefault(tuple(sorted(exchange.joined)), f"process group {exchange.group}")
    for count in range(2, len(order) + 1):
        found.setdefault(tuple(sorted(order[:count])), "")
    return {ranks: where for ranks, where in found.items() if len(ranks) > 1}


def _counts_in(step: int, trace: Prepared, kept: set[int]) -> int | None:
    """The step in which an exchange's waits count: if its own was not sampled, the next one, which it reaches into."""
    if step in kept:
        return step
    return step + 1 if step + 1 in kept and step not in trace.bounds[trace.ranks[0]] else None


def _excess(trace: Prepared, kept: set[int], ranks: Collection[int]) -> dict[str, float]:
    """By phase: ms per step that these ranks took longer than the others since they were last together.

    Ranks were together when the last one joined an exchange that all of them take part in. From there until it joins
    the next exchange, each rank's time consists of phases, so the differences of phases tell exactly why one joined
    later.
    """
    releases: dict[frozenset[int], list[int]] = {}
    latest: dict[tuple[int, int], tuple[Exchange, int]] = {}
    for exchange in trace.exchanges:
        step = _counts_in(exchange.step, trace, kept)
        last = max(exchange.members, key=lambda member: member.joined)
        if step is None or last.rank not in ranks or all(member.rank in ranks for member in exchange.members):
            continue
        first = min(member.joined for member in exchange.members)
        if last.joined == first or not any(trace.exposed_ns(member.wait) for member in exchange.members):
            continue
        members = frozenset(exchange.joined)
        if members not in releases:
            releases[members] = [one.last_joined for one in trace.exchanges if members <= one.joined.keys()]
        place = bisect_right(releases[members], first) - 1
        begins = [trace.bounds[one][step][0] for one in trace.ranks if step in trace.bounds[one]]
        begin = releases[members][place] if place >= 0 else min(begins, default=exchange.last_joined)
        # Exchanges after the same meeting have their waits at the same time: the last one covers all of it.
        latest[begin, step] = exchange, begin
    by_step: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (_, step), (exchange, begin) in latest.items():
        for phase, ms in _longer(trace, exchange, begin, ranks).items():
            by_step[step][phase] += ms
    if not by_step:
        return {}
    return {phase: sum(of[phase] for of in by_step.values()) / len(kept) for phase in _CAUSES}


def _longer(trace: Prepared, exchange: Exchange, begin: int, ranks: Collection[int]) -> dict[str, float]:
    """By phase: ms from `begin` until the last of these ranks joined, minus the median of the other ranks."""
    spent = {
        member.rank: trace.timelines[member.rank].totals(begin, max(begin, member.joined))
        for member in exchange.members
    }
    last = max((member for member in exchange.members if member.rank in ranks), key=lambda member: member.joined)
    mine, others = spent[last.rank], [of for rank, of in spent.items() if rank not in ranks]
    return {phase: (mine[phase] - median_or_zero([of[phase] for of in others])) / 1e6 for phase in _CAUSES}
