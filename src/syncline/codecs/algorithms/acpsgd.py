"""acpsgd: low rank like powersgd, but only one factor per step, alternating."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.algorithms.powersgd import start, worthwhile
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Out, Steps
from syncline.codecs.state import State


@codec("acpsgd", feedback=True, view="matrix", carries="factors")
def acpsgd(grad: Tensor, state: State, *, rank: int = 4, min_rate: float = 2.0) -> Steps:
    """Send P in even steps and Q in odd ones: half of powersgd's bytes, and one all-reduce per step.

    Paper: L. Zhang et al., Evaluation and Optimization of Gradient Compression for Distributed Deep Learning
    (ACP-SGD), ICDCS 2023.
    Formula: even: Q = orthonormal(Q); P_i = M_i Q; P = mean(P_i); out = P Q^T; held back: M_i - P_i Q^T. Odd: the
    same with M^T and the factors swapped.
    Use it: where powersgd is used and latency or bytes matter more; chain `| bf16` to halve the bytes again.
    Costs: 2 * rank * (n + m) bytes on average; residual, P and Q; two thin products, one orthonormalisation.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}: use 1 or more")
    if not worthwhile(grad.shape, rank, min_rate):
        plain: Out = yield Merge(grad, state.dense)
        return plain
    odd = state.step % 2
    m = grad.mT if odd else grad
    held, sent = ("p", "q") if odd else ("q", "p")
    basis = ops.orthonormal(start(state, held, (m.shape[2], min(rank, *m.shape[1:])), grad))
    got = yield Merge(ops.thin_product(m, basis))
    out, own = (f.view(*m.shape[:2], -1) @ basis.mT for f in got[:2])
    sample = out[..., 0]  # a broken value makes a row of the factor broken, and that a row of the product
    out, own = (out.mT, own.mT) if odd else (out, own)
    return Out(out, own, {held: basis, sent: got.mean}, sample=sample)
