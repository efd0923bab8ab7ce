"""The phases of one rank's time: every nanosecond is counted in exactly one phase, so phases sum to the step.

Compute wins over communication: an exchange behind the backward pass costs nothing. The visible rest of an exchange is
exposed; it is shared among the exchanges that are under way at that moment. So is the time in which the training thread
itself packs, starts or unpacks messages. A transfer wins over a wait, and visible waiting time belongs to the wait that
started first.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from syncline.trace.span import COMPUTE_LANES, ISSUING, PHASES, STEP, THREAD_WAITS, Span

_COMMUNICATION = ("encode", "decode", ISSUING, "exchange", "wait")
_ORDER = (*COMPUTE_LANES, "data", "between", *_COMMUNICATION)
_GPU_ORDER = (*COMPUTE_LANES, *_COMMUNICATION, "data", "between")
_RENAMED = {
    "encode": "exposed_encode",
    "decode": "exposed_encode",
    ISSUING: "exposed_exchange",
    "exchange": "exposed_exchange",
}
_EXCHANGE, _WAIT, _OTHER = (PHASES.index(phase) for phase in ("exposed_exchange", "wait", "other"))
_EVER = -(1 << 63)

BLOCKED_PHASES = ("exposed_exchange", "wait")
"""Phases in which a rank waits for an exchange to end."""


def _top_phases(order: Sequence[str]) -> list[int]:
    """By the set of active lanes (one bit each): the phase of the lane that comes first."""
    phases = [PHASES.index(_RENAMED.get(lane, lane)) for lane in order]
    return [_OTHER] + [phases[(lanes & -lanes).bit_length() - 1] for lanes in range(1, 1 << len(order))]


_TOP, _GPU_TOP = _top_phases(_ORDER), _top_phases(_GPU_ORDER)


@dataclass(frozen=True)
class Timeline:
    """The phases of one rank over its whole trace: from `starts[i]` on it is in phase `kinds[i]` of `PHASES`.

    `before[p][i]` is the time in phase p before `starts[i]`; `exposed[n]` is the visible time of span n.
    """

    starts: list[int]
    kinds: list[int]
    before: tuple[list[int], ...]
    exposed: list[float]

    def totals(self, begin: int, end: int) -> dict[str, int]:
        """Nanoseconds by phase between two times; they sum to the time between."""
        first, last = self._until(begin), self._until(end)
        return {phase: last[place] - first[place] for place, phase in enumerate(PHASES)}

    def at(self, time: int) -> tuple[str, int]:
        """The phase just before a time, and when that phase starts; the time before all spans has no start."""
        place = bisect_right(self.starts, time - 1) - 1
        return ("other", min(_EVER, time - 1)) if place < 0 else (PHASES[self.kinds[place]], self.starts[place])

    def _until(self, time: int) -> list[int]:
        place = bisect_right(self.starts, time) - 1
        if place < 0:
            # Before the first span: other, counted from there, or from 0 if there is no span at all.
            result = [0] * len(PHASES)
            result[_OTHER] = time - (self.starts[0] if self.starts else 0)
            return result
        result = [column[place] for column in self.before]
        result[self.kinds[place]] += time - self.starts[place]
        return result


def timeline(spans: Sequence[Span], *, within: Sequence[tuple[int, int]] = (), on_gpu: bool = False) -> Timeline:
    """The phases of ONE rank; `exposed` has the order of `spans`.

    `within`: only time inside these intervals counts as exposed, because outside nobody knows what else ran. `on_gpu`:
    data loading and the time between steps are the host's, and count only while the GPU has nothing to do.
    """
    order, top = (_GPU_ORDER, _GPU_TOP) if on_gpu else (_ORDER, _TOP)
    place_of = {lane: place for place, lane in enumerate(order)}
    edges = [edge for start, end in within if end > start for edge in ((start, 1, -1), (end, -1, -1))]
    for index, span in enumerate(spans):
        if span.end > span.start and span.lane in place_of:
            edges += [(span.start, 1, index), (span.end, -1, index)]
    edges.sort()
    places = [place_of.get(_kind(span), -1) for span in spans]
    starts: list[int] = []
    kinds: list[int] = []
    before: tuple[list[int], ...] = tuple([] for _ in PHASES)
    exposed, totals, active = [0.0] * len(spans), [0] * len(PHASES), [0] * len(order)
    exchanges: dict[int, None] = {}
    waits: dict[int, None] = {}  # in the order of their starts
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
        lane = spans[index].lane
        if lane in ("exchange", "wait") and spans[index].name not in THREAD_WAITS:
            kept = exchanges if lane == "exchange" else waits
            if change > 0:
                kept[index] = None
            else:
                del kept[index]
        now = top[under_way]
        if starts and starts[-1] == time:
            kinds[-1] = now
        elif now != kind:
            starts.append(time)
            kinds.append(now)
            for column, total in zip(before, totals, strict=True):
                column.append(total)
        kind = now
    return Timeline(starts, kinds, before, exposed)


def _kind(span: Span) -> str:
    return ISSUING if span.lane == "wait" and span.name == ISSUING else span.lane


def partition(spans: Iterable[Span], *, on_gpu: bool = False) -> dict[int, dict[str, int]]:
    """Nanoseconds by phase for each step of ONE rank; they sum to that step's wall time exactly.

    A span counts in every step that it overlaps: an exchange may end in the next step's forward pass. `on_gpu`: the
    rank computes on a GPU, so that data loading counts only while the GPU has nothing to do.
    """
    spans = list(spans)
    bounds = {span.step: (span.start, span.end) for span in spans if span.lane == STEP}
    phases = timeline(spans, on_gpu=on_gpu)
    return {step: phases.totals(*bounds[step]) for step in sorted(bounds)}


def shares(steps: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
    """Shares by phase over several steps; they sum to 1."""
    totals = {phase: sum(step[phase] for step in steps.values()) for phase in PHASES}
    whole = sum(totals.values())
    return {phase: total / whole if whole else 0.0 for phase, total in totals.items()}
