"""The engine's own process groups: one per round of communication, and a Gloo group on the host for agreements.

The user's groups are never used, so the user's collectives cannot mix with the engine's. Groups are made once per
parent group and passed from one engine to the next; all ranks ask for them in the same order.
"""

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from syncline._compat.groups import cut_gloo, group_timeout, new_group, world_group
from syncline.errors import UsageError
from syncline.trace.span import group_label

GroupLike = dist.ProcessGroup | DeviceMesh | None
"""The ranks that take part, as users give them."""

_Pool = weakref.WeakKeyDictionary[Any, dict[float, list[dist.ProcessGroup]]]
_free: _Pool = weakref.WeakKeyDictionary()
_free_slim: _Pool = weakref.WeakKeyDictionary()
_free_control: _Pool = weakref.WeakKeyDictionary()
SLIM_BYTES_PER_S = 1.5e9
"""On a slower link one NCCL channel is enough. Each channel takes a share of the GPU while messages are sent."""


def parent_group(given: GroupLike, *, caller: str = "attach") -> dist.ProcessGroup:
    """The process group for a group, a one-dimensional DeviceMesh, or None (all ranks). Errors name the `caller`."""
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            f"{caller} needs a process group: call torch.distributed.init_process_group() first, as under torchrun"
        )
    if given is None:
        return world_group()
    if _outside(given):
        raise UsageError(
            f"this rank is not a member of the process group: call {caller} only on the ranks of the group"
        )
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            names = ", ".join(f"mesh['{name}']" for name in given.mesh_dim_names or ())
            raise UsageError(f"a mesh of {given.ndim} dimensions was given: name one, {names or 'a sub-mesh'}")
        return given.get_group()
    if not isinstance(given, dist.ProcessGroup):
        raise UsageError(
            f"process_group is a {type(given).__name__}: give a ProcessGroup or one dimension of a DeviceMesh"
        )
    return given


def _outside(given: Any) -> bool:
    """Whether this rank is not in the group; torch gives a number in place of such a group."""
    if isinstance(given, DeviceMesh):
        return given.get_coordinate() is None
    return bool(given is dist.GroupMember.NON_GROUP_MEMBER)


@dataclass(eq=False)
class Groups:
    """The process groups of one engine, and small collectives over them."""

    parent: dist.ProcessGroup
    timeout: float
    rounds: list[dist.ProcessGroup] = field(default_factory=list)
    control: dist.ProcessGroup | None = None
    slim: bool = False

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the members."""
        return dist.get_process_group_ranks(self.parent)

    @property
    def label(self) -> str:
        """The name of the group in traces; empty for the world."""
        name = str(getattr(self.parent, "group_name", ""))
        return "" if self.parent is dist.group.WORLD else group_label(name[:8], self.ranks)

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return dist.get_rank(self.parent)

    @property
    def world(self) -> int:
        """The number of ranks that exchange gradients."""
        return dist.get_world_size(self.parent)

    def open(self, rounds: int) -> None:
        """Have groups for this many rounds."""
        if self.control is None:
            self.control = self._take(_free_control, "gloo")
        while len(self.rounds) < rounds:
            self.rounds.append(self._take(self._pool, self._backend()))

    @property
    def _pool(self) -> _Pool:
        return _free_slim if self.slim else _free

    def fit(self, bytes_per_s: float) -> None:
        """Use groups with one NCCL channel on a slow link, and groups with all channels on a fast one."""
        slim = bytes_per_s < SLIM_BYTES_PER_S
        if dist.get_backend(self.parent) == "nccl" and slim != self.slim:
            self._leave_rounds()
            self.slim = slim

    def close(self) -> None:
        """Leave the groups for the next engine."""
        self._leave_rounds()
        if self.control is not None:
            _free_control.setdefault(self.parent, {}).setdefault(self.timeout, []).append(self.control)
        self.control = None

    def _leave_rounds(self) -> None:
        self._pool.setdefault(self.parent, {}).setdefault(self.timeout, []).extend(self.rounds)
        self.rounds = []

    def cut(self) -> None:
        """Abort what is in flight on the host, on every rank; the groups cannot be used any more."""
        for group in self.rounds:
            cut_gloo(group)

    def cut_agreements(self) -> None:
        """Abort an agreement that is in flight; the group of agreements cannot be used any more."""
        if self.control is not None:
            cut_gloo(self.control)

    def _backend(self) -> str | None:
        """The parent's backend, if it is not the default group; torch would use that of the default group."""
        return None if self.parent is world_group() else str(dist.get_backend(self.parent))

    def _take(self, pool: _Pool, backend: str | None) -> dist.ProcessGroup:
        free = pool.setdefault(self.parent, {}).setdefault(self.timeout, [])
        if free:
            return free.pop(0)
        slim = self.slim and pool is not _free_control
        return new_group(self.ranks, timeout=timedelta(seconds=self.timeout), backend=backend, slim=slim)

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's values, one row per rank; on the host."""
        rows = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(rows, values.contiguous(), group=self.control)
        return torch.stack(rows)

    def agree(self, text: str, what: str) -> None:
        """Raise on every rank unless all have the same text; the error shows the first line that differs."""
        digest = hashlib.sha256(text.encode()).digest()[:8]
        rows = self.gather(torch.frombuffer(bytearray(digest), dtype=torch.int64))
        odd = [r for r in range(self.world) if not torch.equal(rows[r], rows[0])]
        if odd:
            first, other = (self._text_of(rank, text).splitlines() for rank in (0, odd[0]))
            here, there = next(pair for pair in zip_longest(other, first) if pair[0] != pair[1])
            shown = f"rank {self.ranks[odd[0]]} {_has(here)}, and rank {self.ranks[0]} {_has(there)}"
            raise UsageError(f"{what} differ between the ranks: {shown}")

    def text_of_rank_0(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        return self._text_of(0, text)

    def _text_of(self, rank: int, text: str) -> str:
        """The text of a rank of the group, on every rank."""
        content = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        size = torch.tensor([content.numel()])
        dist.broadcast(size, src=self.ranks[rank], group=self.control)
        if self.rank != rank:
            content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, src=self.ranks[rank], group=self.control)
        return bytes(content.tolist()).decode()

    def broadcast(self, tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Overwrite the tensors of any dtype with rank 0's values, in one message per dtype."""
        for flat, members in flattened(tensors):
            dist.broadcast(flat, src=self.ranks[0], group=group or self.rounds[0])
            spread(flat, members)


def forget_groups(parent: dist.ProcessGroup) -> None:
    """Destroy the groups that closed engines have left for `parent`; all its ranks call this before they destroy it."""
    for pool in (_free, _free_slim, _free_control):
        for groups in pool.pop(parent, {}).values():
            for group in groups:
                dist.destroy_process_group(group)


def _has(line: str | None) -> str:
    return "has nothing in its place" if line is None else f"has '{line}'"


def flattened(tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """One copy of the values as bytes per dtype and device, with its members: no backend sends every dtype."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    flats = [torch.cat([t.detach().reshape(-1) for t in members]).resolve_conj() for members in kinds.values()]
    return [(flat.view(torch.uint8), members) for flat, members in zip(flats, kinds.values(), strict=True)]


def spread(flat: Tensor, members: Sequence[Tensor]) -> None:
    """Copy the parts of a flat tensor back to its members."""
    values = flat.view(members[0].dtype)
    with torch.no_grad():
        for part, tensor in zip(values.split([t.numel() for t in members]), members, strict=True):
            tensor.copy_(part.view(tensor.shape))


def timeout_of(group: dist.ProcessGroup, given: float | None) -> float:
    """The timeout of a collective in seconds: as given, else the parent group's."""
    if given is None:
        return group_timeout(group)
    if given <= 0:
        raise UsageError(f"timeout is {given}: use a positive number of seconds")
    return float(given)


def names_of(ranks: Sequence[int]) -> str:
    """Ranks for a message: `rank 2`, or `ranks 2, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
