"""Building blocks of exchanges: `AllReduce`, `AllGather`, `Move`, and the shards of a tensor.

An exchange is a generator. It encodes, decodes and merges shards in plain code, and yields a move to send and receive.
`link.py` runs it on real ranks; `emulate.py` runs all ranks in one process.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor

from syncline.codecs import Merge, Out
from syncline.codecs.coder import Payload
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
    """One slice of a merge's tensor: this rank's values, their encoding, and this rank's contribution (`own`).

    It has the primitives `encode`, `decode` and `merge`; a `Move` sends and receives.
    """

    def __init__(self, merge: Merge, start: int, stop: int) -> None:
        self.request, self.start = merge, start
        self.values = merge.tensor[start:stop]
        self.own = self.values
        self.count = stop - start
        self.layout = merge.coder.layout(self.count)
        self.nbytes = nbytes(self.layout)

    def encode(self, values: Tensor, *, weight: int = 1) -> Tensor:
        """Encode values to send. The loss, times `weight` for a mean of that many ranks, is subtracted from `own`."""
        payload: Payload = self.request.coder.encode(values, seed=self.request.seed)
        buffer = pack(payload)
        if self.request.coder.writes(values.dtype):
            return buffer
        if values is self.values and self.own is values and weight == 1:
            self.own = self.decode(buffer)
        else:
            self.own = self.own - (values - self.decode(buffer)) * weight
        return buffer

    def decode(self, buffer: Tensor) -> Tensor:
        """Decode a received buffer; `ValueError` if its size is wrong."""
        payload = unpack(buffer, self.layout)
        return self.request.coder.decode(payload, self.count, seed=self.request.seed)

    def merge(self, buffers: Mapping[int, Tensor], *, own_at: int) -> Tensor:
        """Sum of the received buffers and this rank's own values, always in rank order."""
        total: Tensor | None = None
        for rank in sorted({*buffers, own_at}):
            part = self.values if rank == own_at else self.decode(buffers[rank])
            total = part.clone() if total is None else total.add_(part)
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
    exact = all(shard.own is shard.values for shard in cut)
    own = cut[0].request.tensor if exact else _joined(cut, lambda shard, _: shard.own)
    return Out(_joined(cut, lambda shard, at: shard.decode(finals[at])), own)


def _joined(cut: list[Shard], part: Callable[[Shard, int], Tensor]) -> Tensor:
    """One tensor, filled shard by shard: the allocator can reuse the temporary memory of each shard."""
    whole: Tensor | None = None
    for at, shard in enumerate(cut):
        values = part(shard, at)
        if whole is None:
            whole = values.new_empty(shard.request.tensor.numel())
        whole[shard.start : shard.start + shard.count] = values
    assert whole is not None
    return whole
