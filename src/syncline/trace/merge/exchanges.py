"""Exchange records: each collective matched across ranks, with when every rank joined and when it ended there.

An exchange moves no data before its last rank has joined. The time before that is a wait for the late rank. Here each
exchange span is split at that moment, once; whoever asks about exchanges later reads the records.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from syncline.trace.span import THREAD_WAITS, Span

_Key = tuple[int, str, str, str]


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's part in an exchange: a `wait` for the last rank, then the `transfer`; one of them can be missing.

    A Horovod timeline tells of most ranks only when they joined, so their transfer is unknown.
    """

    wait: Span | None
    transfer: Span | None

    @property
    def _first(self) -> Span:
        span = self.wait or self.transfer
        assert span is not None
        return span

    @property
    def rank(self) -> int:
        """The rank that joined."""
        return self._first.rank

    @property
    def joined(self) -> int:
        """When the rank joined."""
        return self._first.start

    @property
    def started(self) -> int:
        """When its transfer started; without a transfer, when its wait ended."""
        return self.transfer.start if self.transfer is not None else self._first.end

    @property
    def ended(self) -> int:
        """When the exchange ended on this rank."""
        return self.transfer.end if self.transfer is not None else self._first.end

    @property
    def bytes(self) -> int:
        """Bytes of the message; 0 where they are unknown."""
        return self.transfer.bytes if self.transfer is not None else 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective operation with all the ranks that took part."""

    name: str
    unit: str
    step: int
    members: tuple[Member, ...]
    group: str = ""
    """Its process group, as in `Span`."""

    @property
    def joined(self) -> dict[int, int]:
        """By rank: when it joined."""
        return {member.rank: member.joined for member in self.members}

    @property
    def ended(self) -> dict[int, int]:
        """By rank: when the exchange ended there."""
        return {member.rank: member.ended for member in self.members}

    @property
    def last_joined(self) -> int:
        """When the last rank joined."""
        return max(member.joined for member in self.members)

    def late_rank(self, member: Member) -> int | None:
        """The rank that this member waited for; None if it did not wait."""
        if member.started <= member.joined:
            return None
        last = max((one for one in self.members if one.joined <= member.started), key=lambda one: one.joined)
        return last.rank if last.rank != member.rank and last.joined > member.joined else None


def match_exchanges(spans: Iterable[Span], *, split: bool = True) -> tuple[list[Span], list[Exchange]]:
    """The spans with waits split off, and the exchanges in the order in which their last ranks joined.

    Spans of one exchange have the same step, name, unit and process group on every rank. Where a step repeats them, the
    n-th on one rank belongs to the n-th on the others. A rank that joined after a span had ended was not waited for: in
    an exchange made of sends and receives not every rank needs every other. Spans that are split already (traces from
    files) stay as they are. `split=False`: the ranks' clocks cannot be compared, so no wait is split off.
    """
    spans = list(spans)
    found: dict[tuple[*_Key, int], list[Member]] = defaultdict(list)
    joins = [s for s in spans if s.lane == "exchange" or (s.lane == "wait" and s.name not in THREAD_WAITS)]
    joins.sort(key=lambda span: (span.rank, span.start, span.end))
    for _, mine in groupby(joins, key=lambda span: span.rank):
        counts: dict[_Key, int] = defaultdict(int)
        for key, member in _members(mine):
            found[*key, counts[key]].append(member)
            counts[key] += 1
    pieces: dict[int, tuple[Span, Span]] = {}
    exchanges = []
    for (step, name, unit, group, _), members in found.items():
        if split:
            members = [_split(member, members, pieces) for member in members]
        exchanges.append(Exchange(name, unit, step, tuple(members), group))
    result = [piece for span in spans for piece in pieces.get(id(span), (span,))]
    return result, sorted(exchanges, key=lambda exchange: exchange.last_joined)


def _members(spans: Iterable[Span]) -> Iterator[tuple[_Key, Member]]:
    """The exchanges of one rank; a wait belongs to the transfer of the same key that starts where it ends."""
    waits: dict[_Key, Span] = {}
    for span in spans:
        key = (span.step, span.name, span.unit, span.group)
        before = waits.pop(key, None)
        if span.lane == "wait":
            waits[key] = span
        if before is not None and (span.lane == "wait" or before.end != span.start):
            yield key, Member(before, None)
            before = None
        if span.lane == "exchange":
            yield key, Member(before, span)
    for key, span in waits.items():
        yield key, Member(span, None)


def _split(member: Member, members: Sequence[Member], pieces: dict[int, tuple[Span, Span]]) -> Member:
    """The member with its wait for the last rank split off; `pieces` gets the two parts of its span."""
    span = member.transfer
    if span is None or member.wait is not None:
        return member
    last = max(other.joined for other in members if other.joined <= span.end)
    if last <= span.start:
        return member
    wait, transfer = replace(span, lane="wait", end=last, bytes=0), replace(span, start=last)
    pieces[id(span)] = (wait, transfer)
    return Member(wait, transfer)
