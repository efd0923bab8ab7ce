"""sharded: every rank aggregates one shard, like co-located parameter servers."""

from syncline.codecs import Merge
from syncline.exchange.definition import exchange
from syncline.exchange.moves import Move, Moves, Position, make_shards, result


@exchange("sharded")
def sharded(merge: Merge, position: Position) -> Moves:
    """Send each shard to its owner, who decodes, merges and encodes it again for all ranks.

    Each rank sends 2(N-1)/N payloads, in two rounds. The owner's own values are not compressed in its shard; the loss
    of the second encoding goes into the owner's residual.
    """
    cut = make_shards(merge, position.world)
    others = [r for r in range(position.world) if r != position.rank]
    mine = cut[position.rank]
    shards = {r: cut[r].encode_own() for r in others}
    got = yield Move(shards, dict.fromkeys(others, mine.nbytes))
    final = mine.finish(mine.merge(got, own_at=position.rank), position.workers)
    got = yield Move(dict.fromkeys(others, final), {r: cut[r].nbytes for r in others})
    return result(cut, [final if r == position.rank else got[r] for r in range(position.world)])
