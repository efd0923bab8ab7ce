"""allreduce: the sum of the backend's own collective."""

from syncline.codecs import Merge
from syncline.codecs.requests import adding
from syncline.exchange.definition import exchange
from syncline.exchange.moves import AllReduce, Moves, Position


@exchange("allreduce", adds_only=True)
def allreduce(merge: Merge, position: Position) -> Moves:
    """Sum payloads that add, with one collective: NCCL's or Gloo's ring.

    Each rank sends 2(N-1)/N payloads. The sum has the payload's precision (bf16 adds in bf16).
    """
    part, lost = adding(merge, position.workers)
    # The collective works in position: it must not overwrite the gradient without permission.
    keep = part.data_ptr() == merge.tensor.data_ptr() and not merge.scratch
    total = yield AllReduce(part.clone() if keep else part)
    return merge.out(merge.coder.decode((total,), merge.tensor.numel(), seed=merge.seed), lost)
