"""Network of an emulated cluster: namespaces, a bridge, veth pairs and traffic shaping, made with pyroute2.

A namespace here has no name and no process: it exists while a descriptor of it is open. When the owner process ends,
for whatever reason, its descriptors are closed and the kernel removes namespaces, bridge, links and shapers.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from syncline.cluster import namespaces
from syncline.errors import UsageError

INTERFACE = "sync0"
MAX_NODES = 250
MAX_BANDWIDTH = 8 * (2**32 - 1)  # tbf's rate field: 32 bits, in bytes per second
# 512 KiB at 1 Gbit/s. A smaller burst shapes single messages better, but loses rate when the cores are busy.
_BURST_SECONDS = 512 * 1024 * 8 / 1e9
_MIN_BURST = 32 * 1024
# 64 KiB plus headers, as TCP hands them over. When a link changes, one may be in the queue, and tbf never sends a
# packet that is larger than the burst.
_LARGEST_PACKET = 80 * 1024
_QUEUE_SECONDS = 0.05  # a shallow queue makes several BBR flows collapse
_ROOT = 0xFFFFFFFF  # TC_H_ROOT
_NO_SUCH_KIND = 2  # ENOENT: the kernel was built without this qdisc
_MISSING = {
    "tbf": "this kernel has no tbf, so links cannot be shaped: leave the bandwidth out",
    "netem": "this kernel has no netem, so links cannot have latency or loss: leave them out",
}


@dataclass(frozen=True)
class LinkShape:
    """Bandwidth (bits per second), one-way latency (seconds) and loss of each node's link; None and 0: no limit."""

    bandwidth: int | None = None
    latency: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Qdisc:
    """One queueing discipline of an interface, in the form that pyroute2 expects."""

    kind: str
    handle: str
    options: dict[str, Any]


def address(index: int) -> str:
    """IP address of a node. All clusters use the same addresses, since each has its own namespaces."""
    return f"10.77.0.{index + 1}"


def uplink(link: LinkShape, *, burst: int = _MIN_BURST) -> list[Qdisc]:
    """Shapers from a node to the switch: latency and loss (only here, so once per path), then the rate."""
    if not (link.latency or link.loss):
        return downlink(link, burst=burst)
    # Room for twice the packets in flight; with less, netem itself would drop some.
    flight = (link.bandwidth or 40 * 10**9) * link.latency / 8 / 1500
    delay = {"delay": round(link.latency * 1e6), "loss": link.loss * 100, "limit": max(1000, round(2 * flight))}
    below = [Qdisc(q.kind, "10:", {**q.options, "parent": "1:1"}) for q in downlink(link, burst=burst)]
    return [Qdisc("netem", "1:", delay), *below]


def downlink(link: LinkShape, *, burst: int = _MIN_BURST) -> list[Qdisc]:
    """Shapers from the switch to a node: the rate, with a burst of at least `burst` bytes."""
    if link.bandwidth is None:
        return []
    burst = max(burst, round(link.bandwidth / 8 * _BURST_SECONDS))
    limit = burst + round(link.bandwidth / 8 * _QUEUE_SECONDS)
    return [Qdisc("tbf", "1:", {"rate": link.bandwidth // 8, "burst": burst, "limit": limit})]


def build(count: int, *, link: LinkShape, keep: list[int]) -> None:
    """Connect `count` nodes to a switch; appends each namespace descriptor to `keep`: the switch, then the nodes."""
    _in_thread(_build, count, link, keep)


def change(before: LinkShape, after: LinkShape, *, descriptors: list[int]) -> None:
    """Reshape the links that `build` has made, one node after the other, while packets are in flight."""
    _in_thread(_change, before, after, descriptors)


def _in_thread(function: Callable[..., None], *arguments: Any) -> None:
    # In another thread, because an ordinary user's thread cannot leave a namespace that it has entered.
    _pyroute2()
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(function, *arguments).result()


def _change(before: LinkShape, after: LinkShape, descriptors: list[int]) -> None:
    switch, nodes = descriptors[0], descriptors[1:]
    with _inside(switch) as ip:
        for number in range(len(nodes)):
            _reshape(ip, _index(ip, f"port{number}"), downlink(before), downlink(after, burst=_LARGEST_PACKET))
    for node in nodes:
        with _inside(node) as ip:
            _reshape(ip, _index(ip, INTERFACE), uplink(before), uplink(after, burst=_LARGEST_PACKET))


def _reshape(ip: Any, index: int, before: list[Qdisc], after: list[Qdisc]) -> None:
    # Replace in place: deleting a queue would lose its packets, and TCP would treat that as congestion.
    _shape(ip, index, after, verb="replace")
    error = _pyroute2().netlink.exceptions.NetlinkError
    for qdisc in before:
        if qdisc.handle not in {kept.handle for kept in after}:
            with suppress(error):  # it may not exist: an earlier change may have failed half way
                ip.tc("del", index=index, handle=qdisc.handle, parent=qdisc.options.get("parent", _ROOT))


def _build(count: int, link: LinkShape, keep: list[int]) -> None:
    for _ in range(count + 1):
        try:
            namespaces.unshare(namespaces.CLONE_NEWNET)
        except OSError as error:
            raise UsageError(
                f"the kernel refuses a network namespace ({error.strerror}): "
                "raise user.max_net_namespaces, or leave the sandbox that forbids it"
            ) from None
        keep.append(namespaces.open_current_network())
    switch, nodes = keep[0], keep[1:]
    with _inside(switch) as ip:
        ip.link("add", ifname="switch", kind="bridge", br_mcast_snooping=0)
        bridge = _index(ip, "switch")
        _up(ip, bridge)
        for number, node in enumerate(nodes):
            peer = {"ifname": INTERFACE, "net_ns_fd": node}
            ip.link("add", ifname=f"port{number}", kind="veth", peer=peer)
            port = _index(ip, f"port{number}")
            _shape(ip, port, downlink(link))
            _up(ip, port, master=bridge)
    for number, node in enumerate(nodes):
        with _inside(node) as ip:
            interface = _index(ip, INTERFACE)
            _up(ip, _index(ip, "lo"))
            _shape(ip, interface, uplink(link))
            ip.addr("add", index=interface, address=address(number), prefixlen=24)
            _up(ip, interface)


@contextmanager
def _inside(descriptor: int) -> Iterator[Any]:
    namespaces.setns(descriptor, namespaces.CLONE_NEWNET)
    with _pyroute2().IPRoute() as ip:
        yield ip


def _index(ip: Any, name: str) -> int:
    return int(ip.link_lookup(ifname=name)[0])


def _up(ip: Any, index: int, **settings: Any) -> None:
    # No IPv6 addresses: neighbour discovery would add bytes that no rank has sent.
    quiet = {"attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})]}
    ip.link("set", index=index, IFLA_AF_SPEC=quiet)
    ip.link("set", index=index, state="up", **settings)


def _shape(ip: Any, index: int, qdiscs: list[Qdisc], *, verb: str = "add") -> None:
    error = _pyroute2().netlink.exceptions.NetlinkError
    for qdisc in qdiscs:
        try:
            ip.tc(verb, qdisc.kind, index, qdisc.handle, **qdisc.options)
        except error as failure:
            if failure.code != _NO_SUCH_KIND:
                raise
            raise UsageError(_MISSING[qdisc.kind]) from None


def _pyroute2() -> Any:
    try:
        import pyroute2
        import pyroute2.netlink.exceptions
    except ImportError:
        raise UsageError("emulated nodes need pyroute2: pip install pyroute2") from None
    return pyroute2
