"""Cuts the link of an emulated node so that no packet passes and TCP gets no reset, as a host that loses its power.

As a program, for the nodes of a command in the same sandbox: `python links.py WAY PID-OF-RANK PID-OF-COMMAND`.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyroute2 import IPRoute

from syncline.cluster import namespaces, network

WAYS = ("port down", "port unplugged", "interface down")
"""The switch's port goes down; the port leaves the switch; the node's own interface goes down."""


def cut(way: str, *, victim: int, owner: int) -> float:
    """Cut the link of the node that process `victim` is in, on the cluster of process `owner`; returns when."""
    with ThreadPoolExecutor(max_workers=1) as pool:  # a thread of its own: it changes its namespace
        return pool.submit(_cut, way, victim, owner).result()


def _cut(way: str, victim: int, owner: int) -> float:
    _enter(Path(f"/proc/{victim}/ns/net"))
    with IPRoute() as ip:
        index = ip.link_lookup(ifname=network.INTERFACE)[0]
        port = ip.get_links(index)[0].get_attr("IFLA_LINK")
        if way == "interface down":
            ip.link("set", index=index, state="down")
            assert ip.get_links(index)[0].get_attr("IFLA_OPERSTATE") == "DOWN"
            return time.monotonic()
    _enter_switch(owner)
    with IPRoute() as ip:
        if way == "port down":
            ip.link("set", index=port, state="down")
            assert ip.get_links(port)[0].get_attr("IFLA_OPERSTATE") == "DOWN"
        else:
            ip.link("set", index=port, master=0)
            assert not ip.get_links(port)[0].get_attr("IFLA_MASTER")
    return time.monotonic()


def _enter(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    namespaces.setns(descriptor, namespaces.CLONE_NEWNET)
    os.close(descriptor)


def _enter_switch(owner: int) -> None:
    """Enter the one of the owner's namespaces that has the switch."""
    for descriptor in Path(f"/proc/{owner}/fd").iterdir():
        if str(descriptor.readlink()).startswith("net:"):
            _enter(descriptor)
            with IPRoute() as ip:
                if ip.link_lookup(ifname="switch"):
                    return
    raise AssertionError(f"process {owner} holds no switch")


if __name__ == "__main__":
    print(cut(sys.argv[1], victim=int(sys.argv[2]), owner=int(sys.argv[3])))
