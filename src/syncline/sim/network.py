"""Closed forms for the time of an exchange among n ranks, and a fit of latency and bandwidth to measurements.

Every rank has its own full-duplex link, equally fast in both directions; the busiest link counts. A form gives the
number of consecutive message latencies and the bytes over that link. Its cost does not depend on the number of ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations
from statistics import median

from syncline.errors import UsageError
from syncline.registry import Registry
from syncline.spec import options, parse_one
from syncline.stats import weighted_median

_MOST = 150  # sizes that `fit` compares in pairs


@dataclass(frozen=True, slots=True)
class Transfer:
    """One communication: its latency, and the seconds that its bytes take at full bandwidth."""

    latency: float
    wire: float


@dataclass(frozen=True)
class Cost:
    """Cost of one exchange: consecutive latencies, bytes over the busiest link, seconds on other links."""

    messages: float
    nbytes: float
    aside: float = 0.0


@dataclass(frozen=True)
class Network:
    """Links between ranks. `launch` is the fixed time to start any communication."""

    latency: float
    bytes_per_s: float
    launch: float = 0.0
    tree: bool = False
    """The backend's collectives need log2(n) hops for small messages, instead of a ring's n-1."""
    inside: "Network | None" = None
    """The links within a node, for `hierarchical`; None: the same links."""

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.launch >= 0 and self.bytes_per_s > 0):
            raise UsageError(
                f"latency={self.latency}, launch={self.launch}, bytes_per_s={self.bytes_per_s}: "
                "use 0 or more, 0 or more, and more than 0"
            )

    def transfer(self, exchange: str, size: float, nodes: int, *, plain: float | None = None) -> Transfer:
        """One communication of `size` bytes per rank by an exchange such as `"server(servers=2)"`.

        `plain`: the bytes before compression, which `hierarchical` sends inside a node.
        """
        if nodes <= 1:
            return Transfer(0.0, 0.0)
        cost = _cost(self, exchange, size, nodes, size if plain is None else plain)
        return Transfer(self.launch + cost.messages * self.latency + cost.aside, cost.nbytes / self.bytes_per_s)

    def seconds(self, exchange: str, size: float, nodes: int, *, plain: float | None = None) -> float:
        """Seconds that it takes if nothing else uses the network."""
        one = self.transfer(exchange, size, nodes, plain=plain)
        return one.latency + one.wire


EXCHANGE_TIMES: Registry[Callable[..., Cost]] = Registry("exchange_time")
exchange_time = EXCHANGE_TIMES.register
"""Decorator: register `form(network, size, nodes, plain, **options) -> Cost` for the exchange of this name."""


@lru_cache(maxsize=256)
def _form(exchange: str) -> Callable[..., Cost]:
    call = parse_one(exchange)
    form = EXCHANGE_TIMES.get(call.name)
    return partial(form, **options(call, form, lead=4))


def _cost(network: Network, exchange: str, size: float, nodes: int, plain: float) -> Cost:
    return _form(exchange)(network, size, nodes, plain)


def _hops(network: Network, nodes: int) -> int:
    return math.ceil(math.log2(nodes)) if network.tree else nodes - 1


@exchange_time("allreduce")
def allreduce(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """Bytes of a ring; latencies of a ring, or of a tree up and down (`tree`)."""
    return Cost(2 * _hops(network, nodes), 2 * (nodes - 1) / nodes * size)


@exchange_time("allgather")
def allgather(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """Every rank receives the payloads of all others."""
    return Cost(_hops(network, nodes), (nodes - 1) * size)


@exchange_time("sharded")
def sharded(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """Shards to their owners and back: two consecutive messages."""
    return Cost(2, 2 * (nodes - 1) / nodes * size)


@exchange_time("ring")
def ring(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """One shard per hop, twice around the ring."""
    return Cost(2 * (nodes - 1), 2 * (nodes - 1) / nodes * size)


@exchange_time("server")
def server(network: Network, size: float, nodes: int, plain: float, servers: int = 1, dedicated: bool = False) -> Cost:
    """Into and out of the busiest link: a server's, or a worker's if there are many servers."""
    most = nodes - 1 if dedicated else nodes
    if not 1 <= servers <= most:
        raise UsageError(f"server(servers={servers}) among {nodes}: use 1 to {most} servers")
    senders = nodes - servers if dedicated else nodes - 1
    least = 1.0 if servers < nodes else 0.0
    return Cost(2, (max(least, senders / servers) + max(least, (nodes - 1) / servers)) * size)


@exchange_time("gather-scatter")
def gather_scatter(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """All payloads into rank 0, then all results out of it."""
    return Cost(2, 2 * (nodes - 1) * size)


@exchange_time("hierarchical")
def hierarchical(network: Network, size: float, nodes: int, plain: float, node: int = 2, between: str = "auto") -> Cost:
    """Uncompressed shards inside each node, an exchange of the sums between nodes, uncompressed shards inside again.

    With `network.inside`, the network's links are those of nodes, which their ranks share; else each rank has its own.
    """
    if node < 1:
        raise UsageError(f"hierarchical(node={node}): use 1 or more ranks per node")
    members, groups = min(node, nodes), math.ceil(nodes / node)
    carriers = nodes - (groups - 1) * node
    local = Cost(2, 2 * (members - 1) / carriers * plain) if members > 1 else Cost(0, 0)
    pattern = between if between != "auto" else "allgather" if groups == 2 else "sharded"
    outer = _cost(network, pattern, size, groups, plain) if groups > 1 else Cost(0, 0)
    if network.inside is None:
        return Cost(local.messages + outer.messages, local.nbytes + outer.nbytes / carriers, outer.aside)
    aside = local.messages * network.inside.latency + local.nbytes / network.inside.bytes_per_s
    return Cost(outer.messages, outer.nbytes, outer.aside + aside)


def fit(
    samples: Sequence[tuple[float, float]], *, exchange: str | None = None, nodes: int = 2, tree: bool = False
) -> Network:
    """Fit a network to measured (bytes, seconds) of single messages, or of an exchange among `nodes` ranks.

    A robust line through the medians of each size: the weighted median of the slopes of all pairs (Theil-Sen, weighted
    by distance), so outliers do little harm. The latency is 0 or more and includes the cost of a launch. If time
    does not grow with bytes, the bandwidth is infinite.
    """
    if not samples:
        raise UsageError("a fit needs at least one measured (bytes, seconds)")
    unit = Network(0.0, 1.0, tree=tree)
    sizes: dict[float, list[float]] = {}
    messages = 1.0
    for size, seconds in samples:
        cost = Cost(1, size) if exchange is None else _cost(unit, exchange, size, nodes, size)
        messages = cost.messages
        sizes.setdefault(cost.nbytes, []).append(seconds)
    points = sorted((size, median(times)) for size, times in sizes.items())
    points = points[:: math.ceil(len(points) / _MOST)]
    slope = weighted_median([((b[1] - a[1]) / (b[0] - a[0]), b[0] - a[0]) for a, b in combinations(points, 2)])
    small = points[: (len(points) + 1) // 2]
    offset = median(seconds - max(slope, 0.0) * size for size, seconds in small)
    if offset < 0 or len(points) == 1:
        offset = 0.0
        slope = weighted_median([(seconds / size, size) for size, seconds in points if size])
    return Network(offset / messages, 1 / slope if slope > 0 else math.inf, tree=tree)
