"""Torch internals of process groups: stores, groups, their connections, broadcasts, the flight recorder."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore as FileStore  # type: ignore[attr-defined]
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]
from torch.distributed import rendezvous as rendezvous  # type: ignore[attr-defined]

from syncline._compat.replace_function import replace_function


def default_store() -> Store:
    """The store that the default process group met at."""
    return dist.distributed_c10d._get_default_store()


def world_group() -> dist.ProcessGroup:
    """The default process group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def group_timeout(group: dist.ProcessGroup | None) -> float:
    """Seconds that a collective of this group may take."""
    made = group or world_group()
    options = made._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")).options
    return float(options._timeout.total_seconds())


_groups_made: "weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]]" = weakref.WeakKeyDictionary()
"""Groups that `new_group` has made in this world, by ranks: the same on all members, since they make it together."""


def new_group(
    ranks: Sequence[int], *, timeout: Any, backend: str | None = None, slim: bool = False
) -> dist.ProcessGroup:  # fmt: skip
    """A group of these ranks, made without the others. `slim`: with NCCL, one channel, the smallest share of a GPU."""
    whole = len(ranks) == dist.get_world_size()
    options = None
    if slim:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.max_ctas = 1
    with _unique_group_name(ranks):
        return dist.new_group(  # type: ignore[no-any-return]
            list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=not whole
        )


@contextmanager
def _unique_group_name(ranks: Sequence[int]) -> Iterator[None]:
    """Let torch give a group made by its members alone a name that no earlier one of the same ranks had.

    torch hashes the ranks and the number of groups that exist. Once a group was destroyed, the next one would get its
    name, find its addresses in the store, and wait for connections that nobody accepts.
    """
    c10d: Any = dist.distributed_c10d
    made, key = _groups_made.setdefault(world_group(), Counter()), tuple(sorted(ranks))
    made[key] += 1
    number, original = made[key], c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda members: original([*members, -number])
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original


def abort_group(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Abort what an NCCL group has in flight, so that a host which waits for it is released."""
    with suppress(Exception):
        group._get_backend(device).abort()  # type: ignore[union-attr]


def cut_gloo(group: dist.ProcessGroup) -> None:
    """Close a Gloo group's connections: whoever waits in it, here and on other ranks, gets an error now.

    Gloo's `abort` wakes nobody. A receive that times out closes all connections of the group. One from a rank whose
    connection is closed already does not, so all ranks are tried.
    """
    if dist.get_backend(group) != "gloo":
        return
    for peer in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
        with suppress(RuntimeError):
            late: Any = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=(1 << 31) - 1)
            late.wait(timedelta(milliseconds=1))


def broadcast_coalesced(group: dist.ProcessGroup, tensors: Sequence[Tensor], source: int) -> None:
    """Overwrite the tensors with those of this rank of the group, in few messages, as DistributedDataParallel does."""
    dist._broadcast_coalesced(group, list(tensors), 250 << 20, source)  # type: ignore[attr-defined]


def on_coalesced_broadcast(around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around` in place of the broadcast with which DistributedDataParallel sends rank 0's buffers in forward."""
    return replace_function(dist, "_broadcast_coalesced", around)


def on_every_wait(around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around` in place of `Work.wait`, which Python code calls; torch's collectives that block call it too."""
    return replace_function(dist.Work, "wait", around)


def flight_recorder_dump() -> bytes:
    """torch's record of this process's last collectives, as a pickle of plain values: NCCL's if it is in use."""
    c10d: Any = torch._C._distributed_c10d
    if dist.is_initialized() and "nccl" in dist.get_backend() and hasattr(c10d, "_dump_nccl_trace"):
        return bytes(c10d._dump_nccl_trace())
    return bytes(c10d._dump_fr_trace())
