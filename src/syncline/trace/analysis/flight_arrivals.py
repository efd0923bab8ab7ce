"""Late ranks in flight-recorder dumps: who called each collective last, and how long after the others.

The times are those of the calls on each host's clock, since a dump holds no exact times of transfers. With clocks that
differ by more than the delays, the order is wrong.
"""

from collections import defaultdict
from collections.abc import Sequence
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
    """
    gaps: dict[tuple[int, ...], list[float]] = defaultdict(list)
    longest: dict[tuple[int, ...], float] = defaultdict(float)
    compared = 0
    for group in groups:
        numbers = _shared_numbers(group)
        for number in numbers:
            order = sorted((group.calls[rank][number][0].created, rank) for rank in group.present)
            late, gap = late_together(order)
            compared += 1
            if late and gap / 1e6 >= _LEAST_MS:
                gaps[late].append(gap / 1e6)
                longest[late] = max(longest[late], _longest_interval_ms(group, late[0], numbers))
    whole = sum(map(sum, gaps.values())) or 1.0
    rows = [Arrivals(ranks, len(mine), median(mine), sum(mine) / whole) for ranks, mine in gaps.items()]
    rows.sort(key=lambda row: -row.share)
    ahead = [row for row in rows if row.times_last >= _LEAST_CALLS and min(gaps[row.ranks]) > longest[row.ranks]]
    return ArrivalOrder(tuple(row for row in rows if row not in ahead), compared, tuple(ahead))


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


def _longest_interval_ms(group: GroupCalls, rank: int, numbers: Sequence[int]) -> float:
    created = [group.calls[rank][number][0].created for number in numbers]
    return max((later - earlier for earlier, later in pairwise(created)), default=0) / 1e6


def _shared_numbers(group: GroupCalls) -> list[int]:
    """Numbers that all ranks have called; without the first one of a job, to which ranks come as they start."""
    if len(group.present) < 2:
        return []
    shared = set.intersection(*(set(group.calls[rank]) for rank in group.present))
    return sorted(number for number in shared if number > 1)
