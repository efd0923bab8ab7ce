"""Finds processes, namespaces and interfaces that a test left behind."""

import os
import time
from collections.abc import Callable
from pathlib import Path

MARK = "SYNCLINE_TEST_MARK"


def held_namespaces() -> list[str]:
    """The network namespaces that this process holds a descriptor of."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(descriptor.readlink()))
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return sorted(link for link in links if link.startswith("net:"))


def host_interfaces() -> list[str]:
    """The interfaces of the namespace that the tests run in."""
    return sorted(line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:])


def marked_processes(mark: str | None = None) -> list[str]:
    """The command lines of all living processes of the current test, wherever they hang in the tree."""
    needle = f"{MARK}={mark or os.environ[MARK]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            # This process's own environment was fixed before the mark was set.
            if needle in environment:
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it ended while we looked, or is another user's
    return found


def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
