"""The nodes of the ranks, found by host, boot and network namespace, whoever started them; ranks per node."""

import hashlib
import socket
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch

from syncline.engine.process_groups import Groups
from syncline.errors import UsageError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def node_numbers(groups: Groups) -> list[int]:
    """By rank of the group, the number of its node, counted from 0 in rank order; all ranks call this together."""
    digest = hashlib.sha256(_identity().encode()).digest()[:8]
    found = groups.gather(torch.frombuffer(bytearray(digest), dtype=torch.int64)).flatten().tolist()
    known = list(dict.fromkeys(found))
    return [known.index(one) for one in found]


def ranks_per_node(numbers: Sequence[int]) -> int | None:
    """Ranks on each node, if those of a node follow each other and all nodes but the last have as many; else None.

    >>> ranks_per_node([0, 0, 1, 1]), ranks_per_node([0, 0, 1]), ranks_per_node([0, 1, 0, 1]), ranks_per_node([0, 1, 1])
    (2, 2, None, None)
    """
    sizes = [len(list(run)) for _, run in groupby(numbers)]
    regular = len(sizes) == len(set(numbers)) and set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0]
    return sizes[0] if regular else None


def required_ranks_per_node(groups: Groups, exchange: str) -> int:
    """The ranks per node for an exchange that does not name them; all ranks call this together."""
    found = ranks_per_node(node_numbers(groups))
    if found is None:
        raise UsageError(
            f"exchange '{exchange}' needs nodes with equally many ranks that follow each other, and these differ: start"
            " the ranks node by node, or use another exchange"
        )
    return found


def _identity() -> str:
    """The same text for all processes on one node. Emulated nodes of one machine have a network namespace each."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    network = str(_NETWORK.stat().st_ino) if _NETWORK.exists() else ""
    return f"{socket.gethostname()} {boot} {network}"
