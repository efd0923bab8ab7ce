"""hierarchical: uncompressed values inside a node, compressed values between nodes."""

from collections.abc import Generator
from typing import Any

from torch import Tensor

from syncline.codecs import Merge, Out, cast
from syncline.codecs.requests import relay
from syncline.errors import UsageError
from syncline.exchange.definition import EXCHANGES, exchange
from syncline.exchange.moves import AllGather, AllReduce, Move, Moves, Op, Position, Shard

BETWEEN = ("sharded", "ring", "allgather", "gather-scatter")


@exchange("hierarchical")
def hierarchical(merge: Merge, position: Position, *, node: int = 2, between: str = "sharded") -> Moves:
    """The first rank of each node sums the node's values, exchanges with the other first ranks, and sends the result.

    Each `node` consecutive ranks are a node (the last may be smaller). Only first ranks compress and have residuals.
    """
    if node < 1 or between not in BETWEEN:
        raise UsageError(f"node={node}, between='{between}': use node >= 1 and one of {', '.join(BETWEEN)}")
    leader = position.rank - position.rank % node
    members = list(range(leader + 1, min(leader + node, position.world)))
    whole = merge.whole()
    local = Shard(Merge(whole, cast(whole.dtype)), 0, whole.numel())
    if position.rank != leader:
        yield Move({leader: local.encode_own()})
        got = yield Move({}, {leader: local.nbytes})
        return merge.out(local.decode(got[leader]), None)
    got = yield Move({}, dict.fromkeys(members, local.nbytes))
    total = local.merge(got, own_at=position.rank)
    leaders = list(range(0, position.world, node))
    # Scale the node's sum to the size of one rank's gradient, so that thresholds keep their meaning.
    share = len(leaders) / position.world if merge.mean else 1.0
    spot = Position(leaders.index(leader), len(leaders), len(leaders))
    inner = Merge(_times(total, share), merge.coder, merge.seed, merge.mean, own=False, keep=merge.tracks_loss)
    out = yield from _among(leaders, spot.rank, EXCHANGES.get(between).merge(inner, spot))
    mean = out.mean.to(merge.tensor.dtype)
    yield Move(dict.fromkeys(members, local.encode(mean)))
    return merge.out(mean, None if out.residual is None else _times(out.residual, 1 / share))


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _among(ranks: list[int], position: int, moves: Moves) -> Moves:
    """Run an exchange among some ranks: its rank numbers index `ranks`, and all-gathers become moves."""
    others = [rank for i, rank in enumerate(ranks) if i != position]

    def moved(op: Op) -> Generator[Op, Any, Any]:
        assert not isinstance(op, AllReduce)
        if isinstance(op, AllGather):
            got = yield Move(dict.fromkeys(others, op.buffer), dict.fromkeys(others, op.buffer.numel()))
            return [got.get(rank, op.buffer) for rank in ranks]
        sends = {ranks[r]: buffer for r, buffer in op.sends.items()}
        got = yield Move(sends, {ranks[r]: size for r, size in op.recvs.items()})
        return {ranks.index(r): buffer for r, buffer in got.items()}

    out: Out = yield from relay(moves, moved)
    return out
