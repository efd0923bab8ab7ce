"""What is on the way at each moment: bytes in flight, and the rate at which a rank sends."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
    edges: dict[int, dict[int, list[tuple[int, int, float]]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.lane == "exchange" and span.bytes > 0 and span.end > span.start:
            rate = span.bytes * 8e3 / (span.end - span.start)
            edges[span.rank][span.start].append((1, span.bytes, rate))
            edges[span.rank][span.end].append((-1, -span.bytes, -rate))
    for rank in sorted(edges):
        under_way, size, speed = 0, 0, 0.0
        for at in sorted(edges[rank]):
            for change, more, faster in edges[rank][at]:
                under_way, size, speed = under_way + change, size + more, speed + faster
            speed = speed if under_way else 0.0  # sums of fractions do not come back to zero by themselves
            yield Count(rank, IN_FLIGHT, at, {"bytes": size})
            yield Count(rank, RATE, at, {"Mbit/s": round(max(0.0, speed), 3)})
