"""ring: pass shards around a ring; decode, merge and encode on every hop."""

from torch import Tensor

from syncline.codecs import Merge
from syncline.exchange.definition import exchange
from syncline.exchange.moves import Move, Moves, Position, make_shards, result


@exchange("ring")
def ring(merge: Merge, position: Position) -> Moves:
    """Pass partial sums around, one shard per rank; then pass the finished shards around unchanged.

    Each rank sends 2(N-1)/N payloads in 2(N-1) rounds, to one neighbour only. The loss of every hop goes into the
    residual of the rank that encoded.
    """
    world, rank = position.world, position.rank
    cut = make_shards(merge, world)
    right, left = (rank + 1) % world, (rank - 1) % world
    total: Tensor | None = None
    for hop in range(world - 1):
        incoming = cut[(rank - hop - 1) % world]
        outgoing = cut[(rank - hop) % world]
        buffer = outgoing.encode_own() if total is None else outgoing.encode(total)
        got = yield Move({right: buffer}, {left: incoming.nbytes})
        total = incoming.merge({left: got[left]}, own_at=rank)
    done = (rank + 1) % world
    finals = {done: cut[done].finish(cut[done].values if total is None else total, position.workers)}
    for hop in range(world - 1):
        there, here = (done - hop) % world, (done - hop - 1) % world
        got = yield Move({right: finals[there]}, {left: cut[here].nbytes})
        finals[here] = got[left]
    return result(cut, [finals[i] for i in range(world)])
