"""allgather: every rank gets the payloads of all ranks."""

from collections.abc import Generator, Sequence

from torch import Tensor

from syncline.codecs import Merge
from syncline.exchange.definition import exchange
from syncline.exchange.moves import AllGather, Moves, Op, Position, Shard


def gather(buffer: Tensor, position: Position) -> Generator[Op, Sequence[Tensor], Sequence[Tensor]]:
    """Serve a `Gather`: all buffers in rank order."""
    return (yield AllGather(buffer))


@exchange("allgather", gather=gather)
def allgather(merge: Merge, position: Position) -> Moves:
    """Every rank decodes all payloads and adds them in rank order: no second loss.

    Each rank sends N-1 payloads: for few ranks and high compression.
    """
    shard = Shard(merge, 0, merge.tensor.numel())
    buffers = yield AllGather(shard.encode_own())
    total: Tensor | None = None
    for rank, buffer in enumerate(buffers):
        last = rank == len(buffers) - 1
        total = shard.decode_onto(total, buffer, divisor=position.workers if merge.mean and last else 1)
    assert total is not None
    return merge.out(total, shard.lost)
