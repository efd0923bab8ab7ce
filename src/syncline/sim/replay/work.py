"""What a replay takes from the spans beside training threads: exchanges, whole again, codec work and updates.

An exchange that was cut into a wait and a transfer is one thing here: when the rank came, and when it was over.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syncline.trace.span import BLOCKED, Span

_PART = re.compile(r"\[\d+\]$")
_BESIDE = frozenset({"encode", "exchange", "decode"})
_KINDS = {lane: f"{lane} of units" for lane in (*_BESIDE, "update")}
_REST = "others"  # the engine's update of what is in no unit


@dataclass(slots=True)
class Work:
    """Something that runs beside the training thread, or for which it stands still."""

    rank: int
    lane: str
    name: str
    unit: str
    step: int
    start: int
    end: int
    bytes: int = 0
    joined: int = 0
    """When the last rank had come that was waited for."""
    service: int = 0
    """Nanoseconds from when it had both its ranks and the wire to its end; of codec work and updates, all of it."""
    stretch: int = -1
    """Exchanges of a rank with the same number overlap, one with the next: only together do they tell a bandwidth."""
    place: int = 0
    base: str = ""
    """The unit without the number of its part."""

    @property
    def kind(self) -> str:
        """What it is called beside the training thread's lanes."""
        return _KINDS[self.lane]


def base_of(unit: str) -> str:
    """`net.1` of `net.1[0]`."""
    return _PART.sub("", unit)


def exchange_units(spans: Iterable[Span]) -> frozenset[str]:
    """The units that are exchanged, which tells an update in a worker from one on the training thread."""
    return frozenset({base_of(span.unit) for span in spans if span.lane == "exchange"} | {_REST})


def is_beside(span: Span, units: frozenset[str]) -> bool:
    """Whether a span is no part of the training thread's own time."""
    return span.lane in _BESIDE or (span.lane == "update" and bool(span.unit) and base_of(span.unit) in units)


def works(spans: Sequence[Span], units: frozenset[str]) -> list[Work]:
    """The work of all ranks, exchanges whole, with what each waited for and how long its transfer took."""
    waits = {(s.rank, s.step, s.name, s.unit, s.end): s.start for s in spans if s.lane == "wait" and s.name != BLOCKED}
    made = []
    for s in spans:
        if not is_beside(s, units):
            continue
        begin = waits.get((s.rank, s.step, s.name, s.unit, s.start), s.start) if s.lane == "exchange" else s.start
        made.append(Work(s.rank, s.lane, s.name, s.unit, s.step, begin, s.end, s.bytes, begin, s.end - s.start))
    made.sort(key=lambda w: (w.start, w.end, w.rank))
    for place, work in enumerate(made):
        work.place, work.base = place, base_of(work.unit)
    for group in meetings(made):
        for work in group:
            work.joined = max((other.start for other in group if other.start < work.end), default=work.start)
    _serve(made)
    return made


def meetings(made: Sequence[Work]) -> list[list[Work]]:
    """The exchanges of all ranks that are one: the n-th of a step, name and unit on each."""
    seen: dict[tuple[int, int, str, str], int] = defaultdict(int)
    groups: dict[tuple[int, str, str, int], list[Work]] = defaultdict(list)
    for work in made:
        if work.lane == "exchange":
            mine = (work.rank, work.step, work.name, work.unit)
            groups[work.step, work.name, work.unit, seen[mine]].append(work)
            seen[mine] += 1
    return list(groups.values())


def wire_order(made: Iterable[Work]) -> dict[int, list[Work]]:
    """A rank's exchanges that took time, in the order of their ends: so they had the wire, one after the other."""
    lines: dict[int, list[Work]] = defaultdict(list)
    for work in made:
        if work.lane == "exchange" and work.end > work.start:
            lines[work.rank].append(work)
    for line in lines.values():
        line.sort(key=lambda w: (w.end, w.place))
    return lines


def _serve(made: Sequence[Work]) -> None:
    """Of exchanges that overlap, each has the wire once the one before is over: their services sum to its busy time."""
    stretch = 0
    for line in wire_order(made).values():
        before = 0
        for work in line:
            stretch += work.joined >= before
            work.stretch = stretch
            work.service = work.end - max(work.joined, before)
            before = work.end
