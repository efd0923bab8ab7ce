"""Mismatched collectives: ranks that made other calls than their peers under the same number of a process group."""

from collections import defaultdict
from collections.abc import Sequence

from syncline.trace.analysis.flight_calls import (
    FlightFinding,
    GroupCalls,
    describe,
    place,
    ranks_text,
    signature,
    verb,
)

MISMATCH = "mismatch"


def first_mismatch(group: GroupCalls) -> FlightFinding | None:
    """The first collective of a group that not all of its ranks called in the same way.

    Ranks that differ from the most are named; where two sides are equally large, all of them are.
    """
    numbers = sorted({number for calls in group.calls.values() for number in calls})
    for number in numbers:
        ranks = [rank for rank in group.present if number in group.calls[rank] and number >= group.first[rank]]
        sides: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank in ranks:
            sides[signature(group.calls[rank][number])].append(rank)
        if len(sides) > 1:
            return _finding(group, number, sorted(sides.values(), key=lambda side: (-len(side), side)))
    return None


def _finding(group: GroupCalls, number: int, sides: Sequence[Sequence[int]]) -> FlightFinding:
    usual, others = sides[0], [rank for side in sides[1:] for rank in side]
    undecided = len(sides[1]) == len(usual)
    expected, found = group.calls[usual[0]][number][-1], group.calls[others[0]][number][-1]
    head = f"{ranks_text(usual)} called {describe(expected)}{place(expected)} as number {number} of {group.label}, "
    how = f"but {ranks_text(others)} called {describe(found)}{place(found)}{_explained(group, number, sides)}"
    return FlightFinding(
        kind=MISMATCH,
        ranks=tuple(sorted([*usual, *others] if undecided else others)),
        sentence=head + how,
        group=group.label,
        sequence=number,
        op=expected.op,
        sizes=expected.inputs or expected.outputs,
        waiting=() if undecided else tuple(usual),
        frames=found.user_frames,
    )


def _explained(group: GroupCalls, number: int, sides: Sequence[Sequence[int]]) -> str:
    """How the two lists of calls differ: another order, one call too few, one too many, or only this one."""
    one, other = sides[0], sides[1]
    theirs, mine = (
        [signature(group.calls[side[0]][n]) for n in sorted(group.calls[side[0]]) if n >= number]
        for side in (one, other)
    )
    who = ranks_text(other)
    if len(mine) > 1 and len(theirs) > 1 and mine[:2] == theirs[1::-1]:
        return ", and the two calls after one another in the opposite order"
    if _same_start(mine, theirs[1:]):
        return f": {who} {verb(other, 'has', 'have')} skipped that call"
    if _same_start(mine[1:], theirs):
        return f": {who} {verb(other, 'has', 'have')} made one call more"
    return ""


def _same_start(one: Sequence[object], other: Sequence[object]) -> bool:
    shared = min(len(one), len(other))
    return shared > 0 and list(one[:shared]) == list(other[:shared])
