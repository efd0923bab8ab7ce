"""server: dedicated ranks aggregate, like BytePS's parameter servers."""

from syncline.codecs import Merge
from syncline.errors import UsageError
from syncline.exchange.definition import exchange
from syncline.exchange.moves import Move, Moves, Position, make_shards, result


def workers(world: int, *, servers: int = 1) -> int:
    """All ranks but the last `servers` have gradients."""
    if not 1 <= servers < world:
        raise UsageError(f"server(servers={servers}) in a world of {world}: use 1 to {world - 1} servers")
    return world - servers


@exchange("server", workers=workers)
def server(merge: Merge, position: Position, *, servers: int = 1) -> Moves:
    """Workers send one shard to each server, which decodes, merges, encodes again and sends it back.

    The last `servers` ranks are servers. They run the same codec on zero gradients, which do not count in the mean;
    the loss of their encoding stays in their residual and joins the next step's sum. A worker sends one payload; a
    server sends one shard to each worker.
    """
    cut = make_shards(merge, servers)
    crew = list(range(position.workers))
    if position.rank < position.workers:
        shards = {position.workers + i: shard.encode_own() for i, shard in enumerate(cut)}
        got = yield Move(shards, {position.workers + i: shard.nbytes for i, shard in enumerate(cut)})
        return result(cut, [got[position.workers + i] for i in range(servers)])
    at = position.rank - position.workers
    got = yield Move({}, dict.fromkeys(crew, cut[at].nbytes))
    final = cut[at].finish(cut[at].merge(got, own_at=position.rank), position.workers)
    peers = [position.workers + i for i in range(servers) if i != at]
    sends = dict.fromkeys([*crew, *peers], final)
    got = yield Move(sends, {position.workers + i: cut[i].nbytes for i in range(servers) if i != at})
    return result(cut, [final if i == at else got[position.workers + i] for i in range(servers)])
