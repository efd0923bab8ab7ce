"""What exchanges cost: latency and bandwidth as the trace shows them, and the wire's share of a step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from syncline.stats import mean_or_zero, median, median_or_zero, quantile
from syncline.trace.analysis.exchanges import Joined, Meeting
from syncline.trace.analysis.steps import Prepared

SMALL = 1 << 16
"""Bytes: without sizes to compare, a message below this is taken to cost its latency, one above its bytes."""
ASSUMED_BITS = 100e6
"""Bits a second: what a link has at least, where the trace cannot tell and the messages are small."""

_POINTS = 48
_APART = 8.0  # the largest message over the smallest, for a line through their times
_ALONE = 1.2  # messages under way at once, on average: with more, a message's own time says little
_FASTER = 20.0  # than any step shows: so much, and no more, is believed of a fitted line


@dataclass(frozen=True)
class Wire:
    """A step's exchanges on one rank, the mean over ranks and steps."""

    messages: float
    bytes: float
    wire_bytes: float
    """With what a collective sends several times counted."""
    wait_ms: float
    busy_ms: float
    """Time with at least one transfer under way, hidden or not."""
    latency_ms: float
    """Of one message."""
    bits: float | None
    """Payload bits a second, without the latency; None where no message has a size."""
    known: str
    """Where these come from: `fitted` over sizes, the `link`, `seen` (bytes over time), or `assumed`."""
    link: float | None
    best: float | None
    """The bandwidth that one step in ten exceeds, or a fitted line's where that is more."""

    @property
    def wire_ms(self) -> float | None:
        """What a step's bytes need at least."""
        if self.link:
            return self.wire_bytes * 8e3 / self.link
        return self.bytes * 8e3 / self.best if self.best else None

    @property
    def latency_share(self) -> float:
        """Of the transfers' time, what is latency, as far as latency and bytes explain it."""
        latency = self.messages * self.latency_ms
        moving = self.bytes * 8e3 / self.bits if self.bits else 0.0
        return latency / (latency + moving) if latency else 0.0


def wire(trace: Prepared, found: Sequence[Meeting], steps: Sequence[int], *, link: float | None = None) -> Wire | None:
    """The figures over these steps; None where nothing was exchanged. `link` is its bits a second, if known."""
    kept, workers = set(steps), set(trace.ranks)
    by: dict[tuple[int, int], list[Joined]] = defaultdict(list)
    waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    sent: dict[int, float] = defaultdict(float)
    for meeting in found:
        if meeting.step not in kept:
            continue
        for one in meeting.joined:
            if one.rank in workers:
                waits[one.rank, meeting.step].append((one.at, one.begin))
                if one.moved:
                    by[one.rank, meeting.step].append(one)
                    sent[one.rank] += one.bytes * _factor(meeting.name, len(meeting.joined))
    if not by:
        return None
    ranks, count = len({rank for rank, _ in by}), len(steps)
    whole = ranks * count
    busy = {key: covered([(one.begin, one.end) for one in members]) for key, members in by.items()}
    sizes = {key: sum(one.bytes for one in members) for key, members in by.items()}
    rates = [sizes[key] * 8e9 / busy[key] for key in by if busy[key] and sizes[key]]
    best = quantile(rates, 0.9) if rates else None
    points = _points([m for m in found if m.step in kept])
    crowd = sum(len(members) for members in by.values()) / max(1, sum(_stretches(members) for members in by.values()))
    if crowd > _ALONE:
        # Messages share the wire: of its busy time each has as much as any other.
        count_all = sum(len(members) for members in by.values())
        points = [(sum(sizes.values()) / count_all, sum(busy.values()) / 1e6 / count_all)]
    latency, bits, known = _cost(points, link, best, factor=_mean(sent) / max(1, _mean(sizes) * count))
    if best is not None and bits is not None and known == "fitted":
        best = max(best, bits)
    return Wire(
        messages=sum(len(members) for members in by.values()) / whole,
        bytes=sum(sizes.values()) / whole,
        wire_bytes=sum(sent.values()) / whole,
        wait_ms=sum(covered(pieces) for pieces in waits.values()) / 1e6 / max(1, len(trace.ranks) * count),
        busy_ms=sum(busy.values()) / 1e6 / whole,
        latency_ms=latency,
        bits=bits,
        known=known,
        link=link,
        best=best,
    )


def covered(pieces: Sequence[tuple[int, int]]) -> int:
    """The time that these cover together.

    >>> covered([(0, 10), (5, 20), (30, 31)])
    21
    """
    whole, until = 0, None
    for start, end in sorted(pieces):
        begin = start if until is None else max(start, until)
        if end > begin:
            whole += end - begin
        until = end if until is None else max(until, end)
    return whole


def _stretches(members: Sequence[Joined]) -> int:
    """How many times the wire falls idle behind these."""
    count, until = 0, -1
    for one in sorted(members, key=lambda one: one.begin):
        count += one.begin >= until
        until = max(until, one.end)
    return count


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Latency and time a byte through pairs of bytes and time, or nothing where sizes are too alike.

    Times that do not grow with sizes are latency: a byte costs nothing then.

    The slope is the median of those between all pairs, weighted by how far apart their sizes are, so that neither a
    few odd messages nor many of one size decide it.

    >>> fit([(1000.0, 2.0), (2000.0, 3.0), (9000.0, 10.0), (100.0, 50.0), (20000.0, 21.0)])
    (1.0, 0.001)
    """
    points = _fewer(sorted(point for point in points if point[0] > 0))
    if len(points) < 2 or points[-1][0] < _APART * points[0][0]:
        return None
    slopes = sorted(((b[1] - a[1]) / (b[0] - a[0]), b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0])
    half, so_far, slope = sum(weight for _, weight in slopes) / 2, 0.0, 0.0
    for value, weight in slopes:
        so_far += weight
        if so_far >= half:
            slope = value
            break
    slope = max(0.0, slope)
    return max(0.0, median_or_zero([time - slope * size for size, time in points])), slope


def _mean(values: Mapping[Any, float]) -> float:
    return mean_or_zero(list(values.values()))


def _factor(name: str, ranks: int) -> float:
    """Bytes on a rank's link for each byte of the message, both ways at once counted once."""
    if ranks < 2:
        return 1.0
    return {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": float(ranks - 1)}.get(name, 1.0)


def _points(found: Sequence[Meeting]) -> list[tuple[float, float]]:
    """Bytes and ms of each unit's message, medians."""
    times: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for meeting in found:
        moved = [one for one in meeting.joined if one.moved]
        if moved:
            lasted = median_or_zero([(one.end - one.begin) / 1e6 for one in moved])
            times[meeting.name, meeting.unit].append((max(one.bytes for one in moved), lasted))
    return [(median([size for size, _ in of]), median([time for _, time in of])) for of in times.values()]


def _fewer(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of neighbours by size, so that pairs stay few."""
    width = -(-len(points) // _POINTS) or 1
    groups = [points[at : at + width] for at in range(0, len(points), width)]
    return [
        (median_or_zero([size for size, _ in group]), median_or_zero([time for _, time in group])) for group in groups
    ]


def _cost(
    points: Sequence[tuple[float, float]], link: float | None, best: float | None, *, factor: float
) -> tuple[float, float | None, str]:
    """Latency in ms, payload bits a second, and where they come from."""
    sized = [(size, time) for size, time in points if size > 0]
    if not sized:
        return median_or_zero([time for _, time in points]), None, "seen"
    if (found := fit(sized)) and best:
        latency, slope = found
        return latency, min(8e3 / slope, _FASTER * best) if slope > 0 else _FASTER * best, "fitted"
    usual, lasted = median_or_zero([size for size, _ in sized]), median_or_zero([time for _, time in sized])
    if usual >= SMALL:
        return 0.0, best, "seen"
    bits, known = (link / max(factor, 1e-9), "link") if link else (ASSUMED_BITS, "assumed")
    return max(0.0, lasted - usual * 8e3 / bits), bits, known
