"""Emulated nodes: `Cluster` creates and owns them, `Node` describes one, `enter` moves a process into one."""

import os
from dataclasses import dataclass, replace
from typing import Self

from syncline.cluster import namespaces, network
from syncline.cluster.privileges import ensure_privileges
from syncline.cluster.quantities import format_bandwidth, parse_bandwidth, parse_fraction, parse_time
from syncline.errors import UsageError


@dataclass(frozen=True)
class Node:
    """One emulated node. `netns` is a path that other processes can open while the cluster exists."""

    index: int
    address: str
    interface: str
    netns: str


def enter(node: Node | str) -> None:
    """Move the calling thread, and all that it starts later, into a node (or the path of its namespace).

    Call it while the process has one thread. An ordinary user cannot go back.
    """
    path = node.netns if isinstance(node, Node) else node
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        text = f"cannot open the namespace {path} (is its cluster still running?): {error.strerror}"
        raise type(error)(error.errno, text) from None
    try:
        namespaces.setns(descriptor, namespaces.CLONE_NEWNET)
    except OSError as error:
        text = f"cannot enter the namespace {path}: {os.strerror(error.errno or 0)}"
        raise type(error)(error.errno, text) from None
    finally:
        os.close(descriptor)


def parse_link_bandwidth(bandwidth: str | int | None) -> int | None:
    """Bits per second of a link that the kernel can shape; None is a link without a limit."""
    if bandwidth is None:
        return None
    bits = parse_bandwidth(bandwidth)
    if not 8000 <= bits <= network.MAX_BANDWIDTH:
        most = format_bandwidth(network.MAX_BANDWIDTH)
        raise UsageError(f"a link of {format_bandwidth(bits)} cannot be shaped: choose 8kbit to {most}, or none")
    return bits


class Cluster:
    """Nodes on one machine, each with its own network namespace, on one switch, over shaped links.

    Nothing appears in the machine's own namespace, and nothing has a name there. Everything exists only while this
    process holds descriptors, so `close()`, the end of a `with` block, an error or a signal (even SIGKILL) removes it.
    A process that entered a node keeps that node's namespace until it ends; its link is gone with the switch.

    `bandwidth` holds in each direction of each node's link, `latency` and `loss` on each way between two
    nodes. An ordinary user's process becomes root of its own user namespace (see `ensure_privileges`).
    """

    def __init__(
        self,
        nodes: int = 4,
        *,
        bandwidth: str | int | None = None,
        latency: str | float | None = None,
        loss: str | float | None = None,
    ) -> None:
        if not 1 <= nodes <= network.MAX_NODES:
            raise UsageError(f"{nodes} nodes cannot be emulated: choose 1 to {network.MAX_NODES}")
        self._link = network.LinkShape(
            bandwidth=parse_link_bandwidth(bandwidth), latency=parse_time(latency or 0), loss=parse_fraction(loss or 0)
        )
        ensure_privileges()
        self._descriptors: list[int] = []
        try:
            network.build(nodes, link=self._link, keep=self._descriptors)
        except BaseException:
            self.close()
            raise
        self.nodes = tuple(
            Node(
                index=index,
                address=network.address(index),
                interface=network.INTERFACE,
                netns=f"/proc/{os.getpid()}/fd/{descriptor}",
            )
            for index, descriptor in enumerate(self._descriptors[1:])
        )

    @property
    def bandwidth(self) -> int | None:
        """Current bits per second of each link in each direction; None: no limit."""
        return self._link.bandwidth

    def set_bandwidth(self, bandwidth: str | int | None) -> None:
        """Change the rate of all links, in both directions, while programs use them; None removes the limit."""
        if not self._descriptors:
            raise UsageError("the cluster is closed and has no links: change the bandwidth before close()")
        link = replace(self._link, bandwidth=parse_link_bandwidth(bandwidth))
        network.change(self._link, link, descriptors=self._descriptors)
        self._link = link

    def close(self) -> None:
        """Remove everything; a second call does nothing."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
