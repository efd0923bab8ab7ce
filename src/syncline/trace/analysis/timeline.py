"""One rank's time, every moment given to one phase: the sweep that the partition and all analysis stand on.

Compute wins over communication, a transfer over a wait. What is left of an exchange is exposed, and is shared among
the exchanges under way at that moment; what is left of a wait belongs to the wait that began first.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.trace.span import BLOCKED, PHASES, Span

_PRIORITY = ("forward", "backward", "update", "data", "encode", "decode", "exchange", "wait")
_PLACE = {lane: place for place, lane in enumerate(_PRIORITY)}
_RENAMED = {"encode": "exposed_encode", "decode": "exposed_encode", "exchange": "exposed_exchange"}
_PHASE_OF = [PHASES.index(_RENAMED.get(lane, lane)) for lane in _PRIORITY]
_EXCHANGE, _WAIT, _OTHER = (PHASES.index(phase) for phase in ("exposed_exchange", "wait", "other"))
_EVER = -(1 << 63)
_SHOWN = _PLACE["exchange"]  # from here on, what is visible is told by span
# By the set of lanes under way, a bit each: the phase of the first.
_TOP = [_OTHER] + [_PHASE_OF[(lanes & -lanes).bit_length() - 1] for lanes in range(1, 1 << len(_PRIORITY))]


@dataclass(frozen=True)
class Timeline:
    """The phases of one rank over its whole trace: from `starts[i]` on it is phase `kinds[i]` of `PHASES`.

    `before[p][i]` is the time in phase p up to `starts[i]`; `exposed[n]` is what of span n was visible.
    """

    starts: list[int]
    kinds: list[int]
    before: tuple[list[int], ...]
    exposed: list[float]

    def totals(self, begin: int, end: int) -> dict[str, int]:
        """Nanoseconds by phase between two times; they sum to the time between."""
        first, last = self._until(begin), self._until(end)
        return {phase: last[place] - first[place] for place, phase in enumerate(PHASES)}

    def at(self, time: int) -> tuple[str, int, int]:
        """The phase just before a time, and where that piece begins and ends; what is before all spans began ever."""
        place = bisect_right(self.starts, time - 1) - 1
        if place < 0:
            return "other", min(_EVER, time - 1), time
        end = self.starts[place + 1] if place + 1 < len(self.starts) else time
        return PHASES[self.kinds[place]], self.starts[place], end

    def _until(self, time: int) -> list[int]:
        place = bisect_right(self.starts, time) - 1
        if place < 0:
            # Before the first span: other, counted from there, or from 0 where there is no span at all.
            result = [0] * len(PHASES)
            result[_OTHER] = time - (self.starts[0] if self.starts else 0)
            return result
        result = [column[place] for column in self.before]
        result[self.kinds[place]] += time - self.starts[place]
        return result


def timeline(spans: Sequence[Span], *, within: Sequence[tuple[int, int]] = ()) -> Timeline:
    """The phases of ONE rank; `exposed` is in the order of `spans`.

    With `within` only what lies in one of these times is exposed: of others it is not known what ran beside.
    """
    edges = [edge for start, end in within if end > start for edge in ((start, 1, -1), (end, -1, -1))]
    for index, span in enumerate(spans):
        if span.end > span.start and span.lane in _PLACE:
            edges += [(span.start, 1, index), (span.end, -1, index)]
    edges.sort()
    places = [_PLACE.get(span.lane, -1) for span in spans]
    starts: list[int] = []
    kinds: list[int] = []
    before: tuple[list[int], ...] = tuple([] for _ in PHASES)
    exposed, totals, active = [0.0] * len(spans), [0] * len(PHASES), [0] * len(_PRIORITY)
    exchanges: dict[int, None] = {}
    waits: dict[int, None] = {}  # in the order of their beginnings
    under_way, kind, at, known = 0, -1, 0, int(not within)
    for time, change, index in edges:
        passed, at = time - at, time
        if passed and kind >= 0:
            totals[kind] += passed
            if not known:
                pass
            elif kind == _EXCHANGE:
                for one in exchanges:
                    exposed[one] += passed / len(exchanges)
            elif kind == _WAIT and waits:
                exposed[next(iter(waits))] += passed
        if index < 0:
            known += change
            continue
        place = places[index]
        active[place] += change
        under_way = under_way | 1 << place if active[place] else under_way & ~(1 << place)
        if place >= _SHOWN and spans[index].name != BLOCKED:
            kept = exchanges if place == _SHOWN else waits
            if change > 0:
                kept[index] = None
            else:
                del kept[index]
        now = _TOP[under_way]
        if starts and starts[-1] == time:
            kinds[-1] = now
        elif now != kind:
            starts.append(time)
            kinds.append(now)
            for column, total in zip(before, totals, strict=True):
                column.append(total)
        kind = now
    return Timeline(starts, kinds, before, exposed)
