"""Hangs in flight-recorder dumps: collectives and messages that did not finish, and the ranks that they wait for.

A rank that is missing in one process group because it waits in another one is not to blame: the rank at the end of that
chain is. Ranks that wait for one another in a circle are a deadlock.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from syncline.trace.analysis.flight_calls import (
    FlightFinding,
    GroupCalls,
    describe,
    place,
    ranks_text,
    verb,
)
from syncline.trace.analysis.flight_messages import MISSING, NOT_FINISHED, unfinished_messages
from syncline.trace.analysis.flight_mismatch import MISMATCH
from syncline.trace.formats.flight_read import Call

NO_DUMP, NOT_STARTED, DEADLOCK = "no dump", "not started", "deadlock"


@dataclass(frozen=True)
class Pending:
    """The first collective of a group that some rank has called and not finished."""

    group: GroupCalls
    number: int
    waiting: tuple[int, ...]
    """Ranks that have called it and not finished."""
    missing: tuple[int, ...]
    """Ranks with a dump that have not called it."""
    absent: tuple[int, ...]
    """Ranks of the group without a dump."""

    @property
    def call(self) -> Call:
        """The call, as the first waiting rank made it."""
        return next(call for call in self.group.calls[self.waiting[0]][self.number] if not call.done)


def pending_collective(group: GroupCalls, *, unreadable: Sequence[int] = ()) -> Pending | None:
    """The first collective of a group that is not finished everywhere; None if all are."""
    numbers = sorted({n for rank in group.present for n, calls in group.calls[rank].items() if not _done(calls)})
    if not numbers:
        return None
    number = numbers[0]
    waiting = tuple(r for r in group.present if number in group.calls[r] and not _done(group.calls[r][number]))
    missing = tuple(rank for rank in group.present if group.last(rank) < number)
    absent = tuple(rank for rank in group.members if rank not in group.calls and rank not in unreadable)
    return Pending(group, number, waiting, missing, absent)


def hangs(groups: Sequence[GroupCalls], *, unreadable: Sequence[int] = ()) -> list[FlightFinding]:
    """What the unfinished calls of all groups wait for, the causes first."""
    pending = [one for group in groups if (one := pending_collective(group, unreadable=unreadable))]
    messages = [finding for group in groups for finding in unfinished_messages(group)]
    waiting = [*(one.waiting for one in pending), *(one.waiting for one in messages)]
    blocked = {rank for ranks in waiting for rank in ranks}
    # A call for which only ranks are missing that wait for nothing is at the end of a chain of waits.
    pending.sort(key=lambda one: bool(set(one.missing) & blocked))
    found = [_without(message, blocked) for message in messages]
    for one in pending:
        found.append(_missing(one, blocked) if one.missing else _no_dump(one) if one.absent else _joined_by_all(one))
    if circle := _circle(pending, [message for message in messages if message.kind == MISSING]):
        found.append(circle)
    order = [MISMATCH, MISSING, NO_DUMP, DEADLOCK, NOT_STARTED, NOT_FINISHED]
    return sorted(found, key=lambda finding: (not finding.ranks, order.index(finding.kind)))


def _done(calls: Sequence[Call]) -> bool:
    return all(call.done for call in calls)


def _finding(kind: str, ranks: tuple[int, ...], sentence: str, one: Pending) -> FlightFinding:
    call = one.call
    return FlightFinding(
        kind, ranks, sentence, one.group.label, one.number, call.op, call.inputs or call.outputs, one.waiting,
        call.user_frames,
    )  # fmt: skip


def _missing(one: Pending, blocked: set[int]) -> FlightFinding:
    """Ranks that have not called it; those that wait in another group are not to blame."""
    group, call = one.group, one.call
    guilty = tuple(rank for rank in one.missing if rank not in blocked)
    named = guilty or one.missing
    sentence = (
        f"{ranks_text(named)} never called {describe(call)}, number {one.number} of {group.label};"
        f" {ranks_text(one.waiting)} {verb(one.waiting, 'waits', 'wait')} for it{place(call)}; "
    )
    latest = group.latest_call(named[0])
    if not guilty:
        sentence += f"{ranks_text(named)} {verb(named, 'waits', 'wait')} in another group"
    elif latest is None:
        sentence += f"rank {named[0]} has called nothing in that group"
    else:
        sentence += (
            f"the last call of rank {named[0]} there is number {latest.sequence}, {describe(latest)}{place(latest)}"
        )
    return _finding(MISSING, guilty, sentence, one)


def _no_dump(one: Pending) -> FlightFinding:
    call = one.call
    sentence = (
        f"{ranks_text(one.absent)} left no dump, and {ranks_text(one.waiting)} {verb(one.waiting, 'waits', 'wait')} in"
        f" {describe(call)}, number {one.number} of {one.group.label}{place(call)}: it crashed, was killed, or its dump"
        " was not copied here"
    )
    return _finding(NO_DUMP, one.absent, sentence, one)


def _joined_by_all(one: Pending) -> FlightFinding:
    """All ranks have called it: the GPU of some has not started it, or the data do not arrive."""
    group, call = one.group, one.call
    started = [r for r in group.present if all(c.started for c in group.calls[r].get(one.number, ()))]
    behind = tuple(rank for rank in one.waiting if rank not in started)
    what = f"{describe(call)}, number {one.number} of {group.label}"
    if behind and len(behind) < len(group.present):
        sentence = (
            f"the GPU of {ranks_text(behind)} has not started {what}{place(call)}, which"
            f" {ranks_text(started)} {verb(started, 'has', 'have')} started: earlier work in its stream does not end"
        )
        kind, guilty = NOT_STARTED, behind
    else:
        sentence = (
            f"all ranks have called {what}{place(call)}, and {ranks_text(one.waiting)}"
            f" {verb(one.waiting, 'has', 'have')} not finished it: the network is slow or broken, or the dumps were"
            " taken during it"
        )
        kind, guilty = NOT_FINISHED, ()
    return _finding(kind, guilty, sentence, one)


def _circle(pending: Sequence[Pending], messages: Sequence[FlightFinding]) -> FlightFinding | None:
    """Ranks that wait for one another: every missing rank of a collective or a message waits elsewhere."""
    waits = [(one.waiting, one.missing, _finding(DEADLOCK, (), "", one)) for one in pending]
    waits += [(one.waiting, one.ranks, one) for one in messages]
    waits_for: dict[int, set[int]] = defaultdict(set)
    for waiting, missing, _ in waits:
        for rank in waiting:
            waits_for[rank] |= set(missing)
    circle = tuple(sorted(rank for rank in waits_for if rank in _reachable(rank, waits_for)))
    if not circle:
        return None
    mine = [
        (waiting, call) for waiting, missing, call in waits if set(waiting) & set(circle) and set(missing) & set(circle)
    ]
    parts = [
        f"{ranks_text(waiting)} in {call.op} number {call.sequence} of {call.group}"
        + (f" at {call.frames[0]}" if call.frames else "")
        for waiting, call in mine
    ]
    sentence = f"{ranks_text(circle)} wait for one another: {'; '.join(parts)}: make these calls in the same order"
    return replace(mine[0][1], kind=DEADLOCK, ranks=circle, sentence=sentence, waiting=circle)


def _reachable(start: int, edges: dict[int, set[int]]) -> set[int]:
    found: set[int] = set()
    todo = list(edges.get(start, ()))
    while todo:
        rank = todo.pop()
        if rank not in found:
            found.add(rank)
            todo += edges.get(rank, ())
    return found


def _without(finding: FlightFinding, blocked: set[int]) -> FlightFinding:
    """A finding that does not blame ranks which wait for others themselves; both sides of a mismatch do."""
    if finding.kind == MISMATCH:
        return finding
    return replace(finding, ranks=tuple(rank for rank in finding.ranks if rank not in blocked))
