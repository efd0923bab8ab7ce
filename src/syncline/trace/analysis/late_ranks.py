"""Late ranks: the ranks that others waited for in exchanges, the cost of that, and the work that delayed them.

A rank that is late because it waited for another one itself is not to blame: its part of the delay goes to the rank at
the end of that chain. Ranks that are late together, such as those of a slow host, are one straggler.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.stats import mean_or_zero, median_or_zero
from syncline.trace.analysis.steps import Prepared
from syncline.trace.analysis.timeline import BLOCKED_PHASES
from syncline.trace.merge.exchanges import Exchange, Member
from syncline.trace.span import BLOCKED, PHASES, POINT_TO_POINT, STAGES, rank_list

SHARE = 0.65
"""A straggler has at least this share of all waits; with less, ranks wait for one another in turn."""

_CAUSES = tuple(phase for phase in PHASES if phase != "wait")
_EXPLAINED = 4  # late ranks, the most expensive ones, for which it is computed what they were doing
_NEARLY = 0.8  # of the largest gain: fewer ranks that explain this much are named instead

_Waits = Mapping[int, Mapping[tuple[int, int], float]]  # by late rank, by step and waiting rank: nanoseconds


@dataclass(frozen=True)
class LateRanks:
    """Ranks that others waited for, one or several: `wait_ms` per step on each other rank, `share` of all such waits.

    Transfers that are visible only because these ranks joined late count as waits. excess: by phase, how much longer
    than the others they took. gains: for each usual step, the time that all other ranks waited; without the delay the
    step would be that much shorter.
    """

    ranks: tuple[int, ...]
    share: float
    wait_ms: float
    excess: dict[str, float]
    gains: tuple[float, ...]
    gain_ms: float = 0.0
    """What every other rank waits per step, at least. An exchange that reaches into the next step may count there."""
    where: str = ""
    """What several ranks have in common: their host or their process group."""
    delayed_ms: float = 0.0
    """The part of `wait_ms` that is transfers, visible only because these ranks joined late."""

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
            "delayed_ms": self.delayed_ms,
            "doing": self.doing,
        }


def late_ranks(
    trace: Prepared, steps: Sequence[int], *, hosts: Mapping[int, str] | None = None
) -> tuple[tuple[LateRanks, ...], LateRanks | None, tuple[float, ...]]:
    """The ranks that others waited for in these steps, the most expensive first; and the straggler, if there is one.

    Third, ms of each step, the mean over ranks, of transfers that are visible only because a rank joined late.
    `hosts`: by rank, the name of its host.
    """
    kept = set(steps)
    visible, hidden = _blamed(trace, kept)
    delayed = _delayed_transfers(trace, hidden) if trace.has_compute else {}
    waits = _added(visible, delayed)
    connected = _connected(trace, kept)

    def late(ranks: tuple[int, ...], where: str = "") -> tuple[LateRanks, float]:
        """The ranks, and the share of all waits that other ranks spend on them."""
        others = sorted(connected[ranks[0]] - set(ranks))
        mine = [of for rank, of in waits.items() if rank in ranks]
        by_step = [[sum(of.get((step, other), 0.0) for of in mine) for other in others] for step in steps]
        own, caused = sum(map(sum, by_step)), sum(totals.get(rank, 0.0) for rank in ranks)
        gains = tuple(min(of, default=0.0) / 1e6 for of in by_step)
        means = [mean_or_zero(column) / 1e6 for column in zip(*by_step, strict=True)]
        gain = min(means, default=0.0)
        late_transfers = sum(ns for rank in ranks for (_, by), ns in delayed.get(rank, {}).items() if by in others)
        each = 1e6 * max(1, len(steps) * len(others))
        found = LateRanks(ranks, caused / whole, mean_or_zero(means), {}, gains, gain, where, late_transfers / each)
        return found, own / whole

    def explained(one: LateRanks) -> LateRanks:
        others = [rank for rank in connected[one.rank] if rank not in one.ranks and rank in trace.parts]
        return replace(one, excess=_excess(trace, steps, one.ranks, others)) if trace.has_compute else one

    totals = {rank: sum(of.values()) for rank, of in waits.items()}
    whole = sum(totals.values()) or 1.0
    order = sorted(totals, key=lambda rank: -totals[rank])
    single = [late((rank,))[0] for rank in order]
    candidates = [one for one in single if one.share >= SHARE]
    waited = dict.fromkeys(trace.ranks, 0.0)
    for of in waits.values():
        for (_, rank), ns in of.items():
            waited[rank] = waited.get(rank, 0.0) + ns
    for ranks, where in _groups(trace, sorted(waited, key=lambda rank: waited[rank]), hosts or {}).items():
        together = ranks[0] in connected and len(ranks) <= len(connected[ranks[0]]) / 2
        if together and sum(totals.get(rank, 0.0) for rank in ranks) >= SHARE * whole:
            one, by_others = late(ranks, where)
            candidates += [one] if by_others >= SHARE else []
    most = max((one.gain_ms for one in candidates), default=0.0)
    enough = [one for one in candidates if one.gain_ms >= _NEARLY * most]
    straggler = min(enough, key=lambda one: (len(one.ranks), not one.where, -one.share), default=None)
    shown = [explained(one) if place < _EXPLAINED else one for place, one in enumerate(single)]
    in_steps = dict.fromkeys(steps, 0.0)
    for by_late in delayed.values():
        for (step, _), ns in by_late.items():
            in_steps[step] += ns / 1e6 / len(trace.ranks)
    return tuple(shown), None if straggler is None else explained(straggler), tuple(in_steps.values())


def _blamed(trace: Prepared, kept: set[int]) -> tuple[_Waits, _Waits]:
    """All visible and all hidden waits of these steps, each counted for the rank that caused it.

    That is the last rank to join, as far as it did not wait more than the waiting rank since the two were together:
    that part belongs to the ranks that it waited for.
    """
    meetings = _Meetings(trace)
    history: dict[int, list[tuple[int, dict[int, float]]]] = defaultdict(list)  # by rank: end and causes of its waits
    visible: dict[int, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    hidden: dict[int, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    for exchange in trace.exchanges:
        if exchange.name == POINT_TO_POINT:
            continue  # stages of a pipeline wait for one another even if none is late: see `pipeline_waits`
        step = _counts_in(exchange.step, trace, kept)
        waiting = [(member, late) for member in exchange.members if (late := exchange.late_rank(member)) is not None]
        if not waiting:
            continue
        joined, since = exchange.joined, meetings.before(exchange)
        inherited_by = {
            late: _causes_between(history[late], since, joined[late]) for late in {late for _, late in waiting}
        }
        for member, late in waiting:
            theirs = inherited_by[late]
            own = _causes_between(history[member.rank], since, joined[member.rank])
            inherited = max(0.0, sum(theirs.values()) - sum(own.values()))
            exposed = trace.exposed_ns(member.wait)
            for found, ns in ((visible, exposed), (hidden, member.started - member.joined - exposed)):
                blamed = _shared(ns, late, min(ns, inherited), theirs)
                inherited -= min(ns, inherited)
                if found is visible and exposed:
                    history[member.rank].append((member.started, blamed))
                if step is not None:
                    for rank, part in blamed.items():
                        found[rank][step, member.rank] += part
    return visible, hidden


def _shared(ns: float, late: int, inherited: float, causes: Mapping[int, float]) -> dict[int, float]:
    """A wait by the ranks that caused it: the inherited part is shared by these causes, the rest is the late rank's."""
    blamed = {rank: of * inherited / sum(causes.values()) for rank, of in causes.items()} if inherited else {}
    blamed[late] = blamed.get(late, 0.0) + ns - inherited
    return blamed


def _added(one: _Waits, other: _Waits) -> _Waits:
    """The sums of both, without ranks that nobody waited for."""
    sums: dict[int, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    for waits in (one, other):
        for late, of in waits.items():
            for key, ns in of.items():
                sums[late][key] += ns
    return {late: of for late, of in sums.items() if any(of.values())}


def _delayed_transfers(trace: Prepared, hidden: _Waits) -> _Waits:
    """By late rank, by step and waiting rank: ns of transfers that are visible only because the rank joined late.

    A wait behind compute costs nothing itself, but the transfers after it start later by as much, and the waiting rank
    has no compute left to hide them. The late rank has: there the same transfers are visible for a shorter time.
    """
    found: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for late, of in hidden.items():
        for (step, rank), ns in of.items():
            if late in trace.parts and rank in trace.parts:
                longer = trace.parts[rank][step]["exposed_exchange"] - trace.parts[late][step]["exposed_exchange"]
                if longer > 0:
                    found[late][step, rank] = min(ns, longer)
    return found


def waits_for_transfers(trace: Prepared, steps: Sequence[int]) -> list[float]:
    """Ms of each step, the mean over ranks, that a rank waits because an earlier transfer ended later on the late rank.

    A slow network does not end a transfer on all ranks at once, so such waits are part of its cost.
    """
    kept, meetings = set(steps), _Meetings(trace)
    found: dict[int, float] = dict.fromkeys(steps, 0.0)
    for exchange in trace.exchanges:
        step = _counts_in(exchange.step, trace, kept)
        visible = [(member, trace.exposed_ns(member.wait)) for member in exchange.members]
        if step is None or exchange.name == POINT_TO_POINT or not any(exposed for _, exposed in visible):
            continue
        joined, since = exchange.joined, meetings.before(exchange)

        def transferring(rank: int, joined: Mapping[int, int] = joined, since: int = since) -> int:
            return trace.timelines[rank].totals(since, max(since, joined[rank]))["exposed_exchange"]

        for member, exposed in visible:
            late = exchange.late_rank(member) if exposed else None
            if late is not None:
                found[step] += min(exposed, max(0, transferring(late) - transferring(member.rank)))
    return [ns / 1e6 / len(trace.ranks) for ns in found.values()]


def pipeline_waits(trace: Prepared, steps: Sequence[int]) -> list[float]:
    """Ms of each step, the mean over ranks, of visible waits for a message that one rank sends to another."""
    found = dict.fromkeys(steps, 0.0)
    for exchange in trace.exchanges:
        if exchange.name == POINT_TO_POINT and exchange.step in found:
            found[exchange.step] += sum(trace.exposed_ns(member.wait) for member in exchange.members)
    for span in (span for rank in trace.ranks for span in trace.spans[rank]):
        if (span.name, span.unit) == (BLOCKED, STAGES) and span.step in found:
            found[span.step] += span.end - span.start
    return [ns / 1e6 / len(trace.ranks) for ns in found.values()]


def _causes_between(waits: Sequence[tuple[int, dict[int, float]]], begin: int, end: int) -> dict[int, float]:
    """By rank: the time of waits that it caused and that ended between two times."""
    found: dict[int, float] = defaultdict(float)
    for _, blamed in waits[
        bisect_right(waits, begin, key=lambda wait: wait[0]) : bisect_right(waits, end, key=lambda wait: wait[0])
    ]:
        for rank, ns in blamed.items():
            found[rank] += ns
    return found


class _Meetings:
    """When the ranks of an exchange were last together: when the last rank joined an exchange that has all of them.

    Only an exchange whose end let all of them go on counts: a rank that computed meanwhile did not stop for it, and one
    that was still blocked afterwards may be ahead of the others with its work.
    """

    def __init__(self, trace: Prepared) -> None:
        self._trace = trace
        self._releases: dict[frozenset[int], list[int]] = {}

    def before(self, exchange: Exchange) -> int:
        """The time of the last meeting before any rank joined the exchange, or its step's start if that is later."""
        joined = exchange.joined
        members = frozenset(joined)
        if members not in self._releases:
            self._releases[members] = [
                one.last_joined
                for one in self._trace.exchanges
                if members <= one.joined.keys() and all(map(self._let_go_on, one.members))
            ]
        releases = self._releases[members]
        place = bisect_right(releases, min(joined.values())) - 1
        of_step = (self._trace.bounds[rank].get(exchange.step) for rank in members if rank in self._trace.bounds)
        start = min((bounds[0] for bounds in of_step if bounds), default=None)
        times = [time for time in (releases[place] if place >= 0 else None, start) if time is not None]
        return max(times, default=exchange.last_joined)

    def _let_go_on(self, member: Member) -> bool:
        """Whether a rank was blocked until the exchange ended, and not for longer."""
        if member.rank not in self._trace.timelines:
            return True
        before, after = (self._trace.timelines[member.rank].at(time)[0] for time in (member.ended, member.ended + 1))
        return before in BLOCKED_PHASES and after not in BLOCKED_PHASES


def _connected(trace: Prepared, kept: set[int]) -> dict[int, frozenset[int]]:
    """By rank: the ranks that its delay can reach, through exchanges of any process group."""
    sets: dict[int, frozenset[int]] = {rank: frozenset({rank}) for rank in trace.spans}
    for members in {frozenset(exchange.joined) for exchange in trace.exchanges if exchange.step in kept}:
        joined = frozenset().union(*(sets.get(rank, frozenset({rank})) for rank in members))
        sets |= dict.fromkeys(joined, joined)
    # Aggregators have no steps that a delay could make longer.
    return {rank: of & (set(trace.ranks) | {rank}) for rank, of in sets.items()}


def _groups(trace: Prepared, order: Sequence[int], hosts: Mapping[int, str]) -> dict[tuple[int, ...], str]:
    """Sets of ranks that may be late together, with what they have in common: a host, a process group, or nothing.

    `order`: the ranks that waited least first, since late ranks do not wait.
    """
    found: dict[tuple[int, ...], str] = {}
    for host in dict.fromkeys(hosts.values()):
        found[tuple(sorted(rank for rank, name in hosts.items() if name == host))] = f"host {host}"
    for exchange in trace.exchanges:
        if exchange.group and exchange.name != POINT_TO_POINT:
            found.setdefault(tuple(sorted(exchange.joined)), f"process group {exchange.group}")
    for count in range(2, len(order) + 1):
        found.setdefault(tuple(sorted(order[:count])), "")
    return {ranks: where for ranks, where in found.items() if len(ranks) > 1}


def _counts_in(step: int, trace: Prepared, kept: set[int]) -> int | None:
    """The step in which an exchange's waits count: if its own was not sampled, the next one, which it reaches into."""
    if step in kept:
        return step
    return step + 1 if step + 1 in kept and step not in trace.bounds[trace.ranks[0]] else None


def _excess(trace: Prepared, steps: Sequence[int], ranks: Collection[int], others: Collection[int]) -> dict[str, float]:
    """By phase: ms per step that these ranks took longer than the others, medians of both.

    A step's phases sum to its length, and ranks that wait for one another have steps of the same length: what late
    ranks have more of in one phase, the others have more of in waits and visible transfers.
    """
    if not steps or not others or not all(rank in trace.parts for rank in ranks):
        return {}

    def typical(phase: str, step: int, of: Collection[int]) -> float:
        return median_or_zero([trace.parts[rank][step][phase] / 1e6 for rank in of])

    return {
        phase: mean_or_zero([typical(phase, step, ranks) - typical(phase, step, others) for step in steps])
        for phase in _CAUSES
    }
