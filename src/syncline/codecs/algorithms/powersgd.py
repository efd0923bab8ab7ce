"""powersgd: a low-rank approximation by one power iteration per step."""

import torch
from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.definition import codec
from syncline.codecs.requests import Mean, Merge, Out, Product, Steps
from syncline.codecs.state import State

LAZY = {"cuda": 1 << 20}
"""By device: from this many values on, a matrix's average is computed in the memory of its gradient, and a second time
for the residual. That takes a GPU as long as copying it."""


def worthwhile(shape: torch.Size, rank: int, min_rate: float) -> bool:
    """Whether two factors of this rank are at least `min_rate` times smaller than the matrix."""
    if len(shape) != 3 or not shape.numel():
        return False
    _, rows, columns = shape
    return (rows + columns) * min(rank, rows, columns) * min_rate < rows * columns


def start(state: State, key: str, shape: tuple[int, int], like: Tensor) -> Tensor:
    """The last step's factor with columns of norm 1; a zero column is replaced by random numbers."""
    fresh = state.random(shape, like.device)
    factor = state.get(key, fresh).to(fresh.dtype)
    return ops.unit_columns(factor, fresh)


@codec("powersgd", feedback=True, view="matrix", carries="factors", captures=True)
def powersgd(grad: Tensor, state: State, *, rank: int = 4, min_rate: float = 2.0) -> Steps:
    """Send the factors of a rank-`rank` approximation that all ranks share; two all-reduces per step.

    Paper: T. Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression, NeurIPS 2019.
    Formula: P = orthonormal(mean(M Q)); Q' = mean(M^T P); out = P Q'^T; Q' starts the next step.
    Use it: matrices and convolutions on slow links; rank 4 for CNNs, 32 and more for transformers. Vectors, and
    matrices that would not shrink `min_rate` times, are sent as they are.
    Costs: 4 * rank * (n + m) bytes for n x m; residual and Q; two thin products and an orthonormalisation.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}: use 1 or more")
    if not worthwhile(grad.shape, rank, min_rate):
        plain: Out = yield Merge(grad, state.dense)
        return plain
    _, rows, columns = grad.shape
    q = start(state, "q", (columns, min(rank, rows, columns)), grad)
    p = yield Mean(ops.thin_product(grad, q))
    p = ops.orthonormal(p)
    q = yield Mean(ops.thin_product(grad.mT, p))
    # A broken value makes all of p broken, and a broken row of q a column of the product: its first row shows both.
    if len(grad) == 1 and grad.numel() >= LAZY.get(grad.device.type, grad.numel() + 1):
        return Out(Product(p, q.mT), state={"q": q}, sample=p[:, :1] @ q.mT)
    out = state.product(p, q.mT)
    return Out(out, state={"q": q}, sample=out[:, 0])
