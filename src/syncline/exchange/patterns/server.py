"""server: some ranks aggregate, like BytePS's parameter servers; they train as well, or are dedicated to it."""

from syncline.codecs import Merge
from syncline.errors import UsageError
from syncline.exchange.definition import exchange
from syncline.exchange.moves import Move, Moves, Position, make_shards, result


def workers(world: int, *, servers: int = 1, dedicated: bool = False) -> int:
    """How many ranks have gradients: all, or all but the last `servers` if these are dedicated."""
    most = world - 1 if dedicated else world
    if not 1 <= servers <= most:
        raise UsageError(f"server(servers={servers}) in a world of {world}: use 1 to {most} servers")
    return world - servers if dedicated else world


@exchange("server", workers=workers)
def server(merge: Merge, position: Position, *, servers: int = 1, dedicated: bool = False) -> Moves:
    """Ranks send one shard to each server, which decodes, merges, encodes again and sends it back.

    The last `servers` ranks are servers. If they are `dedicated`, they run the same codec on zero gradients, which do
    not count in the mean. The loss of a server's encoding stays in its residual and joins the next step's sum. A worker
    sends one payload; a server sends one shard to each other rank.
    """
    cut = make_shards(merge, servers)
    rank, first = position.rank, position.world - servers
    owned = {first + i: shard for i, shard in enumerate(cut) if first + i != rank}
    pushed = {owner: shard.encode_own() for owner, shard in owned.items()} if rank < position.workers else {}
    sizes = {owner: shard.nbytes for owner, shard in owned.items()}
    if rank < first:
        got = yield Move(pushed, sizes)
        return result(cut, [got[first + i] for i in range(servers)])
    mine = cut[rank - first]
    others = [r for r in range(position.world) if r != rank]
    got = yield Move(pushed, {r: mine.nbytes for r in others if r < position.workers})
    final = mine.finish(mine.merge(got, own_at=rank), position.workers)
    got = yield Move(dict.fromkeys(others, final), sizes)
    return result(cut, [got.get(first + i, final) for i in range(servers)])
