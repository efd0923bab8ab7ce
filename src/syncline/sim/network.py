"""Closed forms: what an exchange of `size` payload bytes a rank costs among n ranks. 10,000 cost no more than two.

Every rank has a link of its own, as fast out as in, both at once; the slowest rank's link counts. A form says how many
message latencies follow each other and how many bytes pass that link.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from statistics import median

from syncline.errors import UsageError
from syncline.registry import Registry
from syncline.spec import Call, parse_one

_MOST = 150  # sizes that `fit` compares in pairs


@dataclass(frozen=True, slots=True)
class Transfer:
    """One communication: its latency, and the seconds that its bytes take at full bandwidth."""

    latency: float
    wire: float


@dataclass(frozen=True)
class Cost:
    """Of one exchange: latencies one after the other, bytes over the slowest link, seconds on other links."""

    messages: float
    nbytes: float
    aside: float = 0.0


@dataclass(frozen=True)
class Network:
    """Links between ranks. `launch` is what starting any communication costs, however many ranks take part."""

    latency: float
    bytes_per_s: float
    launch: float = 0.0
    tree: bool = False
    """Collectives of the backend pass small messages in log2(n) hops, not around a ring."""
    inside: "Network | None" = None
    """The links within a node, for `hierarchical`; without it they are the same."""

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.launch >= 0 and self.bytes_per_s > 0):
            raise UsageError(
                f"latency={self.latency}, launch={self.launch}, bytes_per_s={self.bytes_per_s}: "
                "use 0 or more, 0 or more, and more than 0"
            )

    def transfer(self, exchange: str, size: float, nodes: int, *, plain: float | None = None) -> Transfer:
        """One communication of `size` bytes a rank by an exchange such as `"server(servers=2)"`.

        `plain`: the bytes before compression, which `hierarchical` sends inside a node.
        """
        if nodes <= 1:
            return Transfer(0.0, 0.0)
        cost = _cost(self, exchange, size, nodes, size if plain is None else plain)
        return Transfer(self.launch + cost.messages * self.latency + cost.aside, cost.nbytes / self.bytes_per_s)

    def seconds(self, exchange: str, size: float, nodes: int, *, plain: float | None = None) -> float:
        """How long it takes with the wire to itself."""
        one = self.transfer(exchange, size, nodes, plain=plain)
        return one.latency + one.wire


EXCHANGE_TIMES: Registry[Callable[..., Cost]] = Registry("exchange_time")
exchange_time = EXCHANGE_TIMES.register
"""Decorator: files `form(network, size, nodes, plain, **options) -> Cost` under the name of its exchange."""


@lru_cache(maxsize=256)
def _form(exchange: str) -> tuple[Callable[..., Cost], Call]:
    call = parse_one(exchange)
    form = EXCHANGE_TIMES.get(call.name)
    try:
        inspect.signature(form).bind(None, 0.0, 2, 0.0, *call.args, **call.kwargs)
    except TypeError as error:
        raise UsageError(f"'{exchange}': {error}; leave that option out") from error
    return form, call


def _cost(network: Network, exchange: str, size: float, nodes: int, plain: float) -> Cost:
    form, call = _form(exchange)
    return form(network, size, nodes, plain, *call.args, **call.kwargs)


def _hops(network: Network, nodes: int) -> int:
    return math.ceil(math.log2(nodes)) if network.tree else nodes - 1


@exchange_time("allreduce")
def allreduce(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """A ring's bytes, and the latencies of a ring or (`tree`) of a tree up and down."""
    return Cost(2 * _hops(network, nodes), 2 * (nodes - 1) / nodes * size)


@exchange_time("allgather")
def allgather(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """Everybody receives everybody's payload."""
    return Cost(_hops(network, nodes), (nodes - 1) * size)


@exchange_time("sharded")
def sharded(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """Shards to their owners and back: two messages deep."""
    return Cost(2, 2 * (nodes - 1) / nodes * size)


@exchange_time("ring")
def ring(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """A shard a hop, twice around."""
    return Cost(2 * (nodes - 1), 2 * (nodes - 1) / nodes * size)


@exchange_time("server")
def server(network: Network, size: float, nodes: int, plain: float, servers: int = 1) -> Cost:
    """In and out of the busiest link: a server's, or a worker's if there are more servers than workers."""
    if not 1 <= servers < nodes:
        raise UsageError(f"server(servers={servers}) among {nodes}: use 1 to {nodes - 1} servers")
    workers = nodes - servers
    return Cost(2, max(1.0, workers / servers) * size + max(1.0, (nodes - 1) / servers) * size)


@exchange_time("gather-scatter")
def gather_scatter(network: Network, size: float, nodes: int, plain: float) -> Cost:
    """Everything into rank 0, then out of it."""
    return Cost(2, 2 * (nodes - 1) * size)


@exchange_time("hierarchical")
def hierarchical(
    network: Network, size: float, nodes: int, plain: float, node: int = 2, between: str = "sharded"
) -> Cost:
    """Plain values into each node's first rank, an exchange of payloads between those, plain values out again."""
    if node < 1:
        raise UsageError(f"hierarchical(node={node}): use 1 or more ranks a node")
    members, leaders = min(node, nodes), math.ceil(nodes / node)
    local = Cost(2, 2 * (members - 1) * plain) if members > 1 else Cost(0, 0)
    outer = _cost(network, between, size, leaders, plain) if leaders > 1 else Cost(0, 0)
    if network.inside is None:
        return Cost(local.messages + outer.messages, local.nbytes + outer.nbytes, outer.aside)
    aside = local.messages * network.inside.latency + local.nbytes / network.inside.bytes_per_s
    return Cost(outer.messages, outer.nbytes, outer.aside + aside)


def fit(
    samples: Sequence[tuple[float, float]], *, exchange: str | None = None, nodes: int = 2, tree: bool = False
) -> Network:
    """The network behind measured (bytes, seconds): of single messages, or of an exchange among `nodes` ranks.

    A line through the medians of each size, by the weighted median of the slopes of all pairs (Theil and Sen's, a
    pair counting by its distance), so that some samples may be far off. Latency is 0 or more, and holds what a launch
    costs; where time does not grow with bytes, the bandwidth is infinite.
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
    slope = _weighted_median([((b[1] - a[1]) / (b[0] - a[0]), b[0] - a[0]) for a, b in combinations(points, 2)])
    small = points[: (len(points) + 1) // 2]
    offset = median(seconds - max(slope, 0.0) * size for size, seconds in small)
    if offset < 0 or len(points) == 1:
        offset = 0.0
        slope = _weighted_median([(seconds / size, size) for size, seconds in points if size])
    return Network(offset / messages, 1 / slope if slope > 0 else math.inf, tree=tree)


def _weighted_median(values: list[tuple[float, float]]) -> float:
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    return 0.0
