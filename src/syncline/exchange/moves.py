"""Building blocks of exchanges: `AllReduce`, `AllGather`, `Move`, and the shards of a tensor.

An exchange is a generator. It encodes, decodes and merges shards in plain code, and yields a move to send and receive.
`link.py` runs it on real ranks; `emulate.py` runs all ranks in one process.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from syncline.codecs import Merge, Out
from syncline.codecs.requests import relay
from syncline.codecs.wire import nbytes, pack, unpack


@dataclass(frozen=True)
class AllReduce:
    """The sum of `tensor` over all ranks, in its own precision."""

    tensor: Tensor


@dataclass(frozen=True)
class AllGather:
    """The `buffer` of every rank, in rank order; all of the same size."""

    buffer: Tensor


@dataclass(frozen=True)
class Move:
    """Send a buffer to each rank in `sends`, and receive a buffer of the given size from each rank in `recvs`.

    All of them at once. The answer maps each sender to its buffer.
    """

    sends: Mapping[int, Tensor] = field(default_factory=dict)
    recvs: Mapping[int, int] = field(default_factory=dict)


Op = AllReduce | AllGather | Move
Moves = Generator[Op, Any, Out]
"""The type of an exchange's generator for a `Merge`."""


@dataclass(frozen=True)
class Position:
    """Rank, world size, and how many ranks (the first ones) have gradients."""

    rank: int
    world: int
    workers: int


class Shard:
    """One slice of a merge's tensor: this rank's values, their encoding, and what of them this rank did not send.

    It has the primitives `encode`, `decode` and `merge`; a `Move` sends and receives.
    """

    def __init__(self, merge: Merge, start: int, stop: int) -> None:
        self.request, self.start, self.count = merge, start, stop - start
        self.tensor = merge.tensor[start:stop]
        self.residual = None if merge.residual is None else merge.residual[start:stop]
        self.lost: Tensor | None = None
        """What this rank did not send; None: nothing."""
        self.coder = merge.coder.part(start, stop)
        self.layout = self.coder.layout(self.count)
        self.nbytes = nbytes(self.layout)

    @cached_property
    def values(self) -> Tensor:
        """This rank's values, residual included."""
        return self.tensor if self.residual is None else self.tensor + self.residual

    def encode_own(self) -> Tensor:
        """Encode this rank's values to send."""
        return self._encode(self.tensor, self.residual, 1)

    def encode(self, values: Tensor, *, weight: int = 1) -> Tensor:
        """Encode merged values to send. This rank has the loss, times `weight` if it is one of a mean of that many."""
        return self._encode(values, None, weight)

    def _encode(self, x: Tensor, residual: Tensor | None, weight: int) -> Tensor:
        coder, seed = self.coder, self.request.seed
        if coder.writes(x.dtype) or not self.request.tracks_loss:
            return pack(coder.encode(x if residual is None else x + residual, seed=seed))
        payload, lost = coder.encode_residual(x, residual, seed=seed)
        if weight != 1:
            lost = lost.mul_(weight)
        self.lost = lost if self.lost is None else self.lost.add_(lost)
        return pack(payload)

    def lost_values(self) -> Tensor:
        """What this rank did not send, as a tensor."""
        return torch.zeros_like(self.tensor) if self.lost is None else self.lost

    def decode(self, buffer: Tensor) -> Tensor:
        """Decode a received buffer; `ValueError` if its size is wrong."""
        payload = unpack(buffer, self.layout)
        return self.coder.decode(payload, self.count, seed=self.request.seed)

    def decode_onto(self, total: Tensor | None, buffer: Tensor, *, divisor: int = 1) -> Tensor:
        """(total + the values of a received buffer) / divisor, in the memory of `total`."""
        payload = unpack(buffer, self.layout)
        return self.coder.decode_onto(total, payload, self.count, divisor=divisor, seed=self.request.seed)

    def merge(self, buffers: Mapping[int, Tensor], *, own_at: int) -> Tensor:
        """Sum of the received buffers and this rank's own values, always in rank order."""
        total: Tensor | None = None
        for rank in sorted({*buffers, own_at}):
            if rank != own_at:
                total = self.decode_onto(total, buffers[rank])
            else:
                total = self.values.clone() if total is None else total.add_(self.values)
        assert total is not None
        return total

    def finish(self, total: Tensor, workers: int) -> Tensor:
        """The encoded result of this shard, to send to every rank."""
        if not self.request.mean:
            return self.encode(total)
        return self.encode(total / workers, weight=workers)


def make_shards(merge: Merge, parts: int) -> list[Shard]:
    """Split the merge's tensor into `parts` shards; sizes differ by at most one value."""
    count = merge.tensor.numel()
    edges = [count * i // parts for i in range(parts + 1)]
    return [Shard(merge, a, b) for a, b in pairwise(edges)]


def result(cut: list[Shard], finals: list[Tensor]) -> Out:
    """The answer, from the final buffer of every shard. All ranks decode the same bytes."""
    exact = all(shard.lost is None for shard in cut)
    lost = None if exact else _joined(cut, lambda shard, _: shard.lost_values())
    return cut[0].request.out(_joined(cut, lambda shard, at: shard.decode(finals[at])), lost)


def among(ranks: Sequence[int], at: int, moves: Moves) -> Moves:
    """Run an exchange among some ranks, as number `at` of them: its rank numbers index `ranks`.

    Its all-gathers become moves, since a backend's collective takes all ranks; it must not all-reduce.
    """
    others = [rank for i, rank in enumerate(ranks) if i != at]

    def moved(op: Op) -> Generator[Op, Any, Any]:
        assert not isinstance(op, AllReduce)
        if isinstance(op, AllGather):
            got = yield Move(dict.fromkeys(others, op.buffer), dict.fromkeys(others, op.buffer.numel()))
            return [got.get(rank, op.buffer) for rank in ranks]
        sends = {ranks[r]: buffer for r, buffer in op.sends.items()}
        got = yield Move(sends, {ranks[r]: size for r, size in op.recvs.items()})
        return {ranks.index(r): buffer for r, buffer in got.items()}

    out: Out = yield from relay(moves, moved)
    return out


def _joined(cut: list[Shard], part: Callable[[Shard, int], Tensor]) -> Tensor:
    """One tensor, filled shard by shard: the allocator can reuse the temporary memory of each shard."""
    if len(cut) == 1:
        return part(cut[0], 0)
    whole: Tensor | None = None
    for at, shard in enumerate(cut):
        values = part(shard, at)
        if whole is None:
            whole = values.new_empty(shard.request.tensor.numel())
        whole[shard.start : shard.start + shard.count] = values
    assert whole is not None
    return whole
