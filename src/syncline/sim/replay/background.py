"""Background work of a replay: exchanges, codec work and updates that ran beside the training threads."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from syncline.trace.merge.exchanges import Exchange
from syncline.trace.span import Span

_PART = re.compile(r"\[\d+\]$")
_BACKGROUND = frozenset({"encode", "exchange", "decode"})
_KINDS = {lane: f"{lane} of units" for lane in (*_BACKGROUND, "update")}
_REST = "others"  # the engine's update of parameters that are in no unit


@dataclass(slots=True)
class Work:
    """One piece of background work; an exchange starts when its rank joined."""

    rank: int
    lane: str
    name: str
    unit: str
    step: int
    start: int
    end: int
    bytes: int = 0
    joined: int = 0
    """When the last rank joined that was waited for."""
    service: int = 0
    """Nanoseconds from when an exchange had all its ranks and the network to its end; of other work, all its time."""
    busy_period: int = -1
    """Exchanges of a rank with the same number overlap: only together do they show a bandwidth."""
    members: tuple["Work", ...] = field(default=(), repr=False, compare=False)
    """The same exchange on all ranks, with this one."""
    place: int = 0
    """Its index in the list of all work."""
    base: str = ""
    """The unit without the number of its part."""

    @property
    def kind(self) -> str:
        """Its lane's name, different from the training thread's lanes."""
        return _KINDS[self.lane]


def base_of(unit: str) -> str:
    """`net.1` of `net.1[0]`."""
    return _PART.sub("", unit)


def exchanged_units(exchanges: Iterable[Exchange]) -> frozenset[str]:
    """The units that are exchanged; updates of these units run in a worker, others on the training thread."""
    return frozenset({base_of(exchange.unit) for exchange in exchanges} | {_REST})


def is_background(span: Span, units: frozenset[str]) -> bool:
    """Whether a span is not part of the training thread's own time."""
    return span.lane in _BACKGROUND or (span.lane == "update" and bool(span.unit) and base_of(span.unit) in units)


def background_work(spans: Sequence[Span], exchanges: Sequence[Exchange], units: frozenset[str]) -> list[Work]:
    """The background work of all ranks in the order of starts."""
    work = [
        Work(s.rank, s.lane, s.name, s.unit, s.step, s.start, s.end, s.bytes, s.start, s.end - s.start)
        for s in spans
        if s.lane != "exchange" and is_background(s, units)
    ]
    for exchange in exchanges:
        group = tuple(
            Work(m.rank, "exchange", exchange.name, exchange.unit, exchange.step, m.joined, m.ended, m.bytes)
            for m in exchange.members
            if m.transfer is not None
        )
        for one in group:
            one.members = group
            one.joined = max((other.start for other in group if other.start < one.end), default=one.start)
        work += group
    work.sort(key=lambda w: (w.start, w.end, w.rank))
    for place, one in enumerate(work):
        one.place, one.base = place, base_of(one.unit)
    _measure_service(work)
    return work


def network_order(work: Iterable[Work]) -> dict[int, list[Work]]:
    """By rank: its exchanges that took time, in the order of their ends, in which they had the network."""
    lines: dict[int, list[Work]] = defaultdict(list)
    for one in work:
        if one.lane == "exchange" and one.end > one.start:
            lines[one.rank].append(one)
    for line in lines.values():
        line.sort(key=lambda w: (w.end, w.place))
    return lines


def _measure_service(work: Sequence[Work]) -> None:
    """Of overlapping exchanges, each has the network once the one before has ended: services sum to its busy time."""
    period = 0
    for line in network_order(work).values():
        before = 0
        for one in line:
            period += one.joined >= before
            one.busy_period = period
            one.service = one.end - max(one.joined, before)
            before = one.end
