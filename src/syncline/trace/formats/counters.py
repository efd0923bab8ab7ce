"""What is on the way at each moment: bytes in flight, and the rate at which a rank sends."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from syncline.trace.span import Span

IN_FLIGHT, RATE = "in flight", "sending"


@dataclass(frozen=True, slots=True)
class Count:
    """The values of a counter of one rank from a time on."""

    rank: int
    name: str
    at: int
    value: dict[str, float]


def counters(spans: Iterable[Span]) -> Iterator[Count]:
    """For every rank bytes in flight, and Mbit/s: an exchange's bytes over its time, summed over those under way."""
    edges: list[tuple[int, int, int, int, float]] = []
    for span in spans:
        if span.lane == "exchange" and span.bytes > 0 and span.end > span.start:
            rate = span.bytes * 8e3 / (span.end - span.start)
            edges.append((span.start, span.rank, 1, span.bytes, rate))
            edges.append((span.end, span.rank, -1, -span.bytes, -rate))
    edges.sort()
    under_way: dict[int, int] = defaultdict(int)
    size: dict[int, int] = defaultdict(int)
    speed: dict[int, float] = defaultdict(float)
    for (at, rank), changes in groupby(edges, key=lambda edge: edge[:2]):
        for _, _, change, more, faster in changes:
            under_way[rank] += change
            size[rank] += more
            speed[rank] += faster
        if not under_way[rank]:
            speed[rank] = 0.0  # sums of fractions do not come back to zero by themselves
        yield Count(rank, IN_FLIGHT, at, {"bytes": size[rank]})
        yield Count(rank, RATE, at, {"Mbit/s": round(max(0.0, speed[rank]), 3)})
