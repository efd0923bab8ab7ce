"""Late ranks in flight-recorder dumps: who called each collective last, and how long after the others.

The times are those of the calls on each host's clock, since a dump holds no exact times of transfers. With clocks that
differ by more than the delays, the order is wrong.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from syncline.trace.analysis.flight_calls import FlightFinding, GroupCalls, place, ranks_text
from syncline.trace.analysis.late_ranks import SHARE
from syncline.trace.analysis.straggler_window import late_together
from syncline.wording import plural

STRAGGLER = "straggler"
_LEAST_MS = 1.0
"""Delays below this are the jitter of calls and clocks."""
_LEAST_CALLS = 3
_Number = tuple[str, int]
"""A collective: the name of its group, and its number there."""
_Before = dict[int, dict[_Number, tuple[_Number | None, float]]]
"""By rank and collective: the call before it, and the milliseconds since then."""


@dataclass(frozen=True)
class Arrivals:
    """How often some ranks called a collective last, and the median time between the others and them."""

    ranks: tuple[int, ...]
    times_last: int
    median_ms: float
    share: float
    """Their share of all such delays."""

    def as_json(self) -> dict[str, object]:
        """As `syncline trace analyze --json` prints it."""
        return {**vars(self), "ranks": list(self.ranks)}


@dataclass(frozen=True)
class ArrivalOrder:
    """The ranks that called collectives last, the most expensive first, and how many collectives were compared."""

    rows: tuple[Arrivals, ...]
    compared: int
    clocks_apart: tuple[Arrivals, ...] = ()
    """Ranks that seem late because their clock is ahead."""


def arrivals(groups: Sequence[GroupCalls]) -> ArrivalOrder:
    """Who called each collective last.

    Ranks behind the largest gap between two arrivals are late together, if they are not the most. Gaps below a
    millisecond are jitter. A rank leaves a collective after all others have joined it. So it cannot be later for every
    collective than its own longest time between two calls, unless its clock is ahead.

    Calls that do not wait (NCCL's) follow each other while a rank is late: the delay counts once, for the first of
    them. Calls with which ranks start do not count.
    """
    every: dict[tuple[int, ...], list[float]] = defaultdict(list)
    gaps: dict[tuple[int, ...], list[float]] = defaultdict(list)
    longest: dict[tuple[int, ...], float] = defaultdict(float)
    compared = 0
    before = _calls_before(groups)
    starting = _starting(before)
    longest_interval = {
        (group.name, rank): _longest_interval_ms(group, rank) for group in groups for rank in group.present
    }
    late_at: dict[_Number, tuple[tuple[int, ...], float]] = {}
    for group, number, order in _in_order(groups):
        late, gap_ns = late_together(order)
        gap, here = gap_ns / 1e6, (group.name, number)
        late_at[here] = late, gap
        if here in starting:
            continue
        is_late = bool(late) and gap >= _LEAST_MS
        if is_late:
            every[late].append(gap)
            longest[late] = max(longest[late], longest_interval[group.name, late[0]])
        if any(_same_delay(rank, gap, before[rank][here], late_at) for rank in late):
            continue
        if not is_late and all(before[rank][here][1] < _LEAST_MS for _, rank in order):
            continue  # nobody has done anything since the last call
        compared += 1
        if is_late:
            gaps[late].append(gap)
    ahead = {late for late, mine in every.items() if len(mine) >= _LEAST_CALLS and min(mine) > longest[late]}
    rows = _rows({late: mine for late, mine in gaps.items() if late not in ahead})
    return ArrivalOrder(rows, compared, _rows({late: every[late] for late in ahead}))


def _rows(gaps: Mapping[tuple[int, ...], list[float]]) -> tuple[Arrivals, ...]:
    whole = sum(map(sum, gaps.values())) or 1.0
    rows = [Arrivals(ranks, len(mine), median(mine), sum(mine) / whole) for ranks, mine in gaps.items()]
    return tuple(sorted(rows, key=lambda row: -row.share))


def straggler(groups: Sequence[GroupCalls], order: ArrivalOrder) -> FlightFinding | None:
    """The ranks that called many collectives clearly later than the others, if there are such."""
    rows, compared = order.rows, order.compared
    if not rows or rows[0].share < SHARE or rows[0].times_last < max(_LEAST_CALLS, compared / 4):
        return None
    late = rows[0]
    group = next(group for group in groups if set(late.ranks) <= set(group.present))
    call = group.latest_call(late.ranks[0])
    sentence = (
        f"{ranks_text(late.ranks)} called {late.times_last} of {plural(compared, 'collective')} last,"
        f" {late.median_ms:.3g} ms after the others (median){place(call)}"
    )
    others = tuple(rank for rank in group.present if rank not in late.ranks)
    frames = call.user_frames if call is not None else ()
    return FlightFinding(STRAGGLER, late.ranks, sentence, group.label, waiting=others, frames=frames)


def _longest_interval_ms(group: GroupCalls, rank: int) -> float:
    created = sorted(call[0].created for call in group.calls[rank].values())
    return max((later - earlier for earlier, later in pairwise(created)), default=0) / 1e6


def _shared_numbers(group: GroupCalls) -> list[int]:
    """Numbers that all ranks have called."""
    if len(group.present) < 2:
        return []
    return sorted(set.intersection(*(set(group.calls[rank]) for rank in group.present)))


def _in_order(groups: Sequence[GroupCalls]) -> list[tuple[GroupCalls, int, list[tuple[int, int]]]]:
    """The collectives of all groups in the order of their first call, each with the times and ranks of its calls."""
    found = []
    for group in groups:
        for number in _shared_numbers(group):
            order = sorted((group.calls[rank][number][0].created, rank) for rank in group.present)
            found.append((group, number, order))
    return sorted(found, key=lambda each: each[2][0])


def _calls_before(groups: Sequence[GroupCalls]) -> _Before:
    """By rank and collective: the call before it, in any group, and the milliseconds since then."""
    of_rank: dict[int, list[tuple[int, _Number]]] = defaultdict(list)
    for group in groups:
        for rank, calls in group.calls.items():
            of_rank[rank] += [(call[0].created, (group.name, number)) for number, call in calls.items()]
    found: _Before = {}
    for rank, calls_of_rank in of_rank.items():
        calls_of_rank.sort()
        found[rank] = {calls_of_rank[0][1]: (None, float("inf"))} if calls_of_rank else {}
        for (earlier, last), (created, here) in pairwise(calls_of_rank):
            found[rank][here] = last, (created - earlier) / 1e6
    return found


def _starting(before: _Before) -> set[_Number]:
    """Collectives that show how ranks start: the first one of each group, and what a rank calls next.

    Ranks come to the first one as they start, and connect to each other in it, some sooner than others.
    """
    found: set[_Number] = set()
    for calls in before.values():
        for here, (last, _) in calls.items():
            if here[1] == 1 or (last is not None and last[1] == 1):
                found.add(here)
    return found


def _same_delay(
    rank: int,
    gap: float,
    before: tuple[_Number | None, float],
    late_at: Mapping[_Number, tuple[tuple[int, ...], float]],
) -> bool:
    """Whether a rank that is late was so at its last call, from which it has come sooner than that delay took."""
    last, since = before
    ranks, earlier = late_at.get(last, ((), 0.0)) if last is not None else ((), 0.0)
    return rank in ranks and since < min(gap, earlier)
