"""The communications that exchanges are written with, and the place of a rank in them.

An exchange is a generator: it encodes, decodes and merges in plain code, and yields these to send and receive.
The driver of real ranks is `link.py`; `emulate.py` runs all ranks in one process.
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
    """The `buffer` of every rank, in rank order; all of one size."""

    buffer: Tensor


@dataclass(frozen=True)
class Move:
    """Send a buffer to each rank in `sends` and receive one of so many bytes from each in `recvs`, all at once.

    The answer maps each sender to its buffer.
    """

    sends: Mapping[int, Tensor] = field(default_factory=dict)
    recvs: Mapping[int, int] = field(default_factory=dict)


Op = AllReduce | AllGather | Move
Moves = Generator[Op, Any, Out]
"""The type of an exchange's generator for a `Merge`."""


@dataclass(frozen=True)
class Place:
    """Which rank this is, of how many, and how many of them (the first) bring gradients."""

    rank: int
    world: int
    workers: int


class Shard:
    """One stretch of a merge's tensor: this rank's values, how they are written, and what they amounted to.

    The five primitives: `encode`, `decode` and `merge` are here, send and receive are a `Move`.
    """

    def __init__(self, merge: Merge, start: int, stop: int) -> None:
        self.request, self.start = merge, start
        self.values = merge.tensor[start:stop]
        self.own = self.values
        self.count = stop - start
        self.layout = merge.coder.layout(self.count)
        self.nbytes = nbytes(self.layout)

    def encode(self, values: Tensor, *, weight: int = 1) -> Tensor:
        """Write values for the wire. What gets lost is booked to this rank, times `weight` for a mean of so many."""
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
        """Read values from the wire; `ValueError` if they cannot be such."""
        payload = unpack(buffer, self.layout)
        return self.request.coder.decode(payload, self.count, seed=self.request.seed)

    def merge(self, buffers: Mapping[int, Tensor], *, own_at: int) -> Tensor:
        """The sum of what others sent and this rank's own values, in rank order whoever computes it."""
        total: Tensor | None = None
        for rank in sorted({*buffers, own_at}):
            part = self.values if rank == own_at else self.decode(buffers[rank])
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        return total

    def finish(self, total: Tensor, workers: int) -> Tensor:
        """The buffer that tells everybody this shard of the result."""
        if not self.request.mean:
            return self.encode(total)
        return self.encode(total / workers, weight=workers)


def make_shards(merge: Merge, parts: int) -> list[Shard]:
    """The merge's tensor cut into so many stretches, equal but for one value."""
    count = merge.tensor.numel()
    edges = [count * i // parts for i in range(parts + 1)]
    return [Shard(merge, a, b) for a, b in pairwise(edges)]


def result(cut: list[Shard], finals: list[Tensor]) -> Out:
    """The answer from every shard's final buffer, decoded by everybody alike."""
    exact = all(shard.own is shard.values for shard in cut)
    own = cut[0].request.tensor if exact else _joined(cut, lambda shard, _: shard.own)
    return Out(_joined(cut, lambda shard, at: shard.decode(finals[at])), own)


def _joined(cut: list[Shard], part: Callable[[Shard, int], Tensor]) -> Tensor:
    """One tensor, filled shard by shard: fresh memory is dear, and what one shard took the next one uses again."""
    whole: Tensor | None = None
    for at, shard in enumerate(cut):
        values = part(shard, at)
        if whole is None:
            whole = values.new_empty(shard.request.tensor.numel())
        whole[shard.start : shard.start + shard.count] = values
    assert whole is not None
    return whole
