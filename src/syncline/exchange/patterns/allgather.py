"""allgather: every rank gets the payloads of all ranks."""

from collections.abc import Generator, Sequence

from torch import Tensor

from syncline.codecs import Merge, Out
from syncline.codecs.wire import pack
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
    own = merge.tensor
    shard = Shard(merge, 0, merge.tensor.numel())
    buffers = yield AllGather(pack(merge.coder.encode(shard.values, seed=merge.seed)))
    total: Tensor | None = None
    for rank, buffer in enumerate(buffers):
        part = shard.decode(buffer)
        own = part if rank == position.rank else own
        total = part.clone() if total is None else total.add_(part)
    assert total is not None
    return Out(total / position.workers if merge.mean else total, own)
