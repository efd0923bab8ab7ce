"""gather-scatter: all ranks send to rank 0, which sends the result back."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from syncline.codecs import Merge
from syncline.exchange.definition import exchange
from syncline.exchange.moves import Move, Moves, Op, Position, Shard, result


def gather(buffer: Tensor, position: Position) -> Generator[Op, dict[int, Tensor], Sequence[Tensor]]:
    """Serve a `Gather`: rank 0 collects the buffers and sends all of them to every rank."""
    others = range(1, position.world)
    size = buffer.numel()
    if position.rank:
        yield Move({0: buffer})
        got = yield Move({}, {0: position.world * size})
        return got[0].split(size) if size else [buffer] * position.world
    got = yield Move({}, dict.fromkeys(others, size))
    every = [buffer, *(got[r] for r in others)]
    yield Move(dict.fromkeys(others, torch.cat(every)))
    return every


@exchange("gather-scatter", gather=gather)
def gather_scatter(merge: Merge, position: Position) -> Moves:
    """All ranks send to rank 0, which decodes, merges, encodes again and sends the result back.

    Rank 0 sends N-1 payloads and receives as many, the others one each: a baseline, and fine for two ranks.
    """
    shard = Shard(merge, 0, merge.tensor.numel())
    others = range(1, position.world)
    if position.rank:
        yield Move({0: shard.encode_own()})
        got = yield Move({}, {0: shard.nbytes})
        return result([shard], [got[0]])
    got = yield Move({}, dict.fromkeys(others, shard.nbytes))
    final = shard.finish(shard.merge(got, own_at=0), position.workers)
    yield Move(dict.fromkeys(others, final))
    return result([shard], [final])
