"""Background work of a replay: exchanges, codec work and updates that ran beside the training threads."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from syncline.trace.merge.exchanges import Exchange
from syncline.trace.span import Span

_PART = re.compile(r"\[\d+\]$")
_BACKGROUND = frozenset({"encode", "exchange", "decode"})
_REST = "others"  # the engine's update of parameters that are in no unit


@dataclass(slots=True, eq=False)
class Work:
    """One piece of background work; an exchange starts when its rank joined."""

    rank: int
    lane: str
    unit: str
    step: int
    start: int
    end: int
    bytes: int = 0
    service: int = 0
    """Nanoseconds from when an exchange had all its ranks and the network to its end; of other work, all its time."""
    busy_period: int = -1
    """Exchanges of a rank with the same number overlap: only together do they show a bandwidth."""
    joins: Sequence["Work"] = field(default=(), repr=False)
    """The same exchange on all ranks that it waits for, with this one."""
    before: "Work | None" = field(default=None, repr=False)
    """The exchange of its rank that had the network before it."""
    place: int = 0
    """Its index in the list of all work."""
    after: Sequence[int] = ()
    """It starts `lag` after the last of other work (`after`) and of `moments` of its rank's thread."""
    moments: Sequence[int] = ()
    lag: int = 0

    @property
    def kind(self) -> str:
        """Its lane's name, different from the training thread's lanes."""
        return f"{self.lane} of units"

    @property
    def base(self) -> str:
        """The unit without the number of its part."""
        return base_of(self.unit)


def base_of(unit: str) -> str:
    """`net.1` of `net.1[0]`."""
    return _PART.sub("", unit)


def split_background(spans: Sequence[Span], exchanges: Sequence[Exchange]) -> tuple[list[Work], dict[int, list[Span]]]:
    """The background work of all ranks in the order of starts, and by rank the spans of its training thread.

    Updates of units that are exchanged run in a worker, other updates on the training thread.
    """
    units = {base_of(one.unit) for one in exchanges if any(member.transfer for member in one.members)} | {_REST}
    work: list[Work] = []
    own: dict[int, list[Span]] = defaultdict(list)
    for s in spans:
        if s.lane not in _BACKGROUND and not (s.lane == "update" and s.unit and base_of(s.unit) in units):
            own[s.rank].append(s)
        elif s.lane != "exchange":
            work.append(Work(s.rank, s.lane, s.unit, s.step, s.start, s.end, s.bytes, s.end - s.start))
    for exchange in exchanges:
        group = [
            Work(m.rank, "exchange", exchange.unit, exchange.step, m.joined, m.ended, m.bytes)
            for m in exchange.members
            if m.transfer is not None
        ]
        for one in group:
            one.joins = [other for other in group if other.start < one.end]
        work += group
    work.sort(key=lambda w: (w.start, w.end, w.rank))
    for place, one in enumerate(work):
        one.place = place
    _measure_service(work)
    return work, own


def _measure_service(work: Sequence[Work]) -> None:
    """Of overlapping exchanges, each has the network once the one before has ended: services sum to its busy time."""
    lines: dict[int, list[Work]] = defaultdict(list)
    for one in sorted(work, key=lambda w: (w.end, w.place)):
        if one.lane == "exchange" and one.end > one.start:
            lines[one.rank].append(one)
    period = 0
    for line in lines.values():
        before = None
        for one in line:
            ready = max(other.start for other in one.joins)
            period += before is None or ready >= before.end
            one.busy_period = period
            one.service = one.end - (ready if before is None else max(ready, before.end))
            one.before, before = before, one
