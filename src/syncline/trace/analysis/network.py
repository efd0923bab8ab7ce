"""Cost of exchanges on the network: messages, bytes, latency and bandwidth, as the trace shows them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from syncline.stats import mean, median, median_or_zero, quantile, weighted_median
from syncline.trace.analysis.steps import Prepared
from syncline.trace.intervals import busy_periods, covered
from syncline.trace.merge.exchanges import Exchange, Member

SMALL = 1 << 16
"""Bytes: if all messages have one size, a smaller message is assumed to cost only latency, a larger one only bytes."""
ASSUMED_BITS = 100e6
"""Bits per second: the assumed least bandwidth, if the messages are small and the trace does not show it."""

_POINTS = 48
_APART = 8.0  # least ratio of the largest message to the smallest, to fit a line through their times
_PACKETS = 1 << 13  # bytes: the times of smaller messages, a few packets each, do not show a bandwidth
_ALONE = 1.2  # mean number of messages under way at once; with more, the time of one message says little
_FASTER = 20.0  # a fitted bandwidth may exceed the one seen in steps by at most this factor


@dataclass(frozen=True)
class NetworkUse:
    """The exchanges of one step on one rank, the mean over ranks and steps."""

    messages: float
    bytes: float
    wire_bytes: float
    """Bytes on the link: parts that a collective sends several times count several times."""
    wait_ms: float
    busy_ms: float
    """Time with at least one transfer under way, hidden or not."""
    latency_ms: float
    """The latency of one message."""
    bits: float | None
    """Payload bits per second, without latency; None if no message has a size."""
    known: str
    """Source of latency and bandwidth: `fitted` over sizes, the `link`, `seen` (bytes over time), or `assumed`."""
    link: float | None
    best: float | None
    """The bandwidth that one step in ten exceeds, or the fitted one if that is higher."""

    @property
    def wire_ms(self) -> float | None:
        """The least time that a step's bytes take."""
        if self.link:
            return self.wire_bytes * 8e3 / self.link
        return self.bytes * 8e3 / self.best if self.best else None

    @property
    def latency_share(self) -> float:
        """The share of latency in the part of the transfers' time that latency and bytes explain."""
        latency = self.messages * self.latency_ms
        moving = self.bytes * 8e3 / self.bits if self.bits else 0.0
        return latency / (latency + moving) if latency else 0.0


def network_use(trace: Prepared, steps: Sequence[int], *, link: float | None = None) -> NetworkUse | None:
    """The network use over these steps; None if nothing was exchanged. `link`: its bits per second, if known."""
    workers = set(trace.ranks)
    by: dict[tuple[int, int], list[Member]] = defaultdict(list)
    waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    sent: dict[int, float] = defaultdict(float)
    kept = set(steps)
    exchanges = [exchange for exchange in trace.exchanges if exchange.step in kept]
    for exchange in exchanges:
        for member in exchange.members:
            if member.rank in workers:
                waits[member.rank, exchange.step].append((member.joined, member.started))
                if member.transfer is not None:
                    by[member.rank, exchange.step].append(member)
                    sent[member.rank] += member.bytes * _factor(exchange.name, len(exchange.members))
    if not by:
        return None
    ranks, count = len({rank for rank, _ in by}), len(steps)
    whole = ranks * count
    periods = {key: busy_periods((one.started, one.ended) for one in members) for key, members in by.items()}
    busy = {key: sum(end - start for start, end in of) for key, of in periods.items()}
    sizes = {key: sum(one.bytes for one in members) for key, members in by.items()}
    rates = [sizes[key] * 8e9 / busy[key] for key in by if busy[key] and sizes[key]]
    best = quantile(rates, 0.9) if rates else None
    points = _points(exchanges)
    messages = sum(len(members) for members in by.values())
    if messages > _ALONE * sum(len(of) for of in periods.values()):
        # Messages share the network: each gets an equal part of its busy time.
        points = [(sum(sizes.values()) / messages, sum(busy.values()) / 1e6 / messages)]
    latency, bits, known = _cost(
        points, link, best, factor=mean(list(sent.values())) / max(1, mean(list(sizes.values())) * count)
    )
    if best is not None and bits is not None and known == "fitted":
        best = max(best, bits)
    return NetworkUse(
        messages=messages / whole,
        bytes=sum(sizes.values()) / whole,
        wire_bytes=sum(sent.values()) / whole,
        wait_ms=sum(covered(intervals) for intervals in waits.values()) / 1e6 / max(1, len(trace.ranks) * count),
        busy_ms=sum(busy.values()) / 1e6 / whole,
        latency_ms=latency,
        bits=bits,
        known=known,
        link=link,
        best=best,
    )


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Fit time = latency + bytes * slope to pairs (bytes, time); None if the sizes are too similar.

    If times do not grow with sizes, all of it is latency and the slope is 0. The slope is the median over all pairs,
    weighted by the difference of their sizes, so that neither a few odd messages nor many of one size decide it.

    >>> fit([(1000.0, 2.0), (2000.0, 3.0), (9000.0, 10.0), (100.0, 50.0), (20000.0, 21.0)])
    (1.0, 0.001)
    """
    points = _fewer(sorted(point for point in points if point[0] > 0))
    if len(points) < 2 or points[-1][0] < _APART * points[0][0]:
        return None
    pairs = [(a, b) for a, b in combinations(points, 2) if b[0] > a[0]]
    slope = max(0.0, weighted_median([((b[1] - a[1]) / (b[0] - a[0]), b[0] - a[0]) for a, b in pairs]))
    return max(0.0, median_or_zero([time - slope * size for size, time in points])), slope


def _factor(name: str, ranks: int) -> float:
    """Bytes on a rank's link per byte of the message; sending and receiving at once count once."""
    if ranks < 2:
        return 1.0
    return {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": float(ranks - 1)}.get(name, 1.0)


def _points(exchanges: Sequence[Exchange]) -> list[tuple[float, float]]:
    """Bytes and ms of each unit's message, medians."""
    times: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for exchange in exchanges:
        transfers = [member.transfer for member in exchange.members if member.transfer is not None]
        if transfers:
            lasted = median([(transfer.end - transfer.start) / 1e6 for transfer in transfers])
            times[exchange.name, exchange.unit].append((max(transfer.bytes for transfer in transfers), lasted))
    return [_middle(of) for of in times.values()]


def _middle(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The medians of bytes and of times."""
    return median([size for size, _ in points]), median([time for _, time in points])


def _fewer(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of neighbours by size, to limit the number of pairs."""
    width = -(-len(points) // _POINTS) or 1
    groups = [points[at : at + width] for at in range(0, len(points), width)]
    return [_middle(group) for group in groups]


def _cost(
    points: Sequence[tuple[float, float]], link: float | None, best: float | None, *, factor: float
) -> tuple[float, float | None, str]:
    """Latency in ms, payload bits per second, and their source."""
    sized = [(size, time) for size, time in points if size > 0]
    if not sized:
        return median_or_zero([time for _, time in points]), None, "seen"
    if (found := fit(sized)) and best and max(size for size, _ in sized) >= _PACKETS:
        latency, slope = found
        return latency, min(8e3 / slope, _FASTER * best) if slope > 0 else _FASTER * best, "fitted"
    usual, lasted = _middle(sized)
    if usual >= SMALL:
        return 0.0, best, "seen"
    bits, known = (link / max(factor, 1e-9), "link") if link else (max(ASSUMED_BITS, best or 0.0), "assumed")
    return max(0.0, lasted - usual * 8e3 / bits), bits, known
