"""hierarchical: uncompressed values inside a node, compressed values between nodes."""

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.codecs import Merge, cast
from syncline.errors import UsageError
from syncline.exchange.definition import EXCHANGES, exchange
from syncline.exchange.moves import Move, Moves, Op, Position, Shard, among, make_shards

BETWEEN = ("auto", "sharded", "ring", "allgather", "gather-scatter")


@exchange("hierarchical")
def hierarchical(merge: Merge, position: Position, *, node: int = 2, between: str = "auto") -> Moves:
    """Sum one shard per rank inside each node, exchange the sums between nodes, and collect the shards inside again.

    Each `node` consecutive ranks are a node. Every rank of a node carries its shard to the ranks that own the same
    shard on other nodes, so a node sends as little as one rank would, and its ranks share the work of the codec. If
    the last node is smaller, only as many ranks of each node carry as that one has. Only ranks that carry have
    residuals. `between` is an exchange; `auto`: `allgather` between two nodes, which loses once, and else `sharded`.
    """
    if node < 1 or between not in BETWEEN:
        raise UsageError(f"node={node}, between='{between}': use node >= 1 and one of {', '.join(BETWEEN)}")
    world, rank = position.world, position.rank
    nodes = [range(first, min(first + node, world)) for first in range(0, world, node)]
    at, mine = rank % node, nodes[rank // node]
    carriers = mine[: len(nodes[-1])]
    whole = merge.whole()
    cut = make_shards(Merge(whole, cast(whole.dtype)), len(carriers))
    others = [r for r in mine if r != rank]
    inward = {r: cut[i].encode_own() for i, r in enumerate(carriers) if r != rank}
    final: dict[int, Tensor] = {}
    lost: Tensor | None = None
    if rank not in carriers:
        yield Move(inward)
    else:
        got = yield Move(inward, dict.fromkeys(others, cut[at].nbytes))
        total = cut[at].merge(got, own_at=rank)
        mean, lost = yield from _between(total, merge, cut[at], [peers[at] for peers in nodes], position, between)
        final = {rank: cut[at].encode(mean.to(merge.tensor.dtype))}
    outward = dict.fromkeys(others, final[rank]) if final else {}
    got = yield Move(outward, {r: cut[i].nbytes for i, r in enumerate(carriers) if r != rank})
    mean = whole.new_empty(whole.numel())
    for shard, owner in zip(cut, carriers, strict=True):
        mean[shard.start : shard.start + shard.count] = shard.decode(final[owner] if owner == rank else got[owner])
    return merge.out(mean, None if lost is None else _placed(lost, cut[at], whole))


def _between(
    total: Tensor, merge: Merge, shard: Shard, peers: Sequence[int], position: Position, between: str
) -> Generator[Op, Any, tuple[Tensor, Tensor | None]]:
    """Exchange a node's sum of a shard with its owners on other nodes: the mean, and what this rank did not send."""
    # Scale the node's sum to the size of one rank's gradient, so that thresholds keep their meaning.
    share = len(peers) / position.world if merge.mean else 1.0
    if len(peers) == 1:
        return _times(total, share), None
    pattern = between if between != "auto" else "allgather" if len(peers) == 2 else "sharded"
    coder = merge.coder.part(shard.start, shard.start + shard.count)
    inner = Merge(_times(total, share), coder, merge.seed, merge.mean, own=False, keep=merge.tracks_loss)
    spot = Position(peers.index(position.rank), len(peers), len(peers))
    out = yield from among(peers, spot.rank, EXCHANGES.get(pattern).merge(inner, spot))
    return out.mean, None if out.residual is None else _times(out.residual, 1 / share)


def _placed(lost: Tensor, shard: Shard, whole: Tensor) -> Tensor:
    """What this rank lost of its shard, as a tensor of the whole."""
    if shard.count == whole.numel():
        return lost
    placed = torch.zeros_like(whole)
    placed[shard.start : shard.start + shard.count] = lost
    return placed


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
