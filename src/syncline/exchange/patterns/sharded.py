"""sharded: every rank aggregates one shard, the co-located parameter server."""

from syncline.codecs import Merge
from syncline.exchange.definition import exchange
from syncline.exchange.moves import Move, Moves, Place, make_shards, result


@exchange("sharded")
def sharded(merge: Merge, place: Place) -> Moves:
    """Send each shard to its owner, who decodes, merges and encodes it again for everybody.

    Sends 2(N-1)/N payloads a rank, in two rounds. The owner's values enter its shard unharmed; the loss of the
    second encoding is booked to the owner.
    """
    cut = make_shards(merge, place.world)
    others = [r for r in range(place.world) if r != place.rank]
    mine = cut[place.rank]
    shards = {r: cut[r].encode(cut[r].values) for r in others}
    got = yield Move(shards, dict.fromkeys(others, mine.nbytes))
    final = mine.finish(mine.merge(got, own_at=place.rank), place.workers)
    got = yield Move(dict.fromkeys(others, final), {r: cut[r].nbytes for r in others})
    return result(cut, [final if r == place.rank else got[r] for r in range(place.world)])
