"""topk: the largest values and their positions."""

import math

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.algorithms.graddrop import decode, leaving_rest
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _encode(x: Tensor, *, ratio: float) -> Payload:
    return ops.topk(x, math.ceil(ratio * x.numel()))


_encode_residual = leaving_rest(_encode)


@codec("topk", feedback=True, direct=True, carries="values", spread=True)
def topk(grad: Tensor, state: State, *, ratio: float = 0.01) -> Merges:
    """Send the `ratio` of values with the largest magnitude.

    Paper: D. Alistarh et al., The Convergence of Sparsified Gradient Methods, NeurIPS 2018.
    Formula: out = mean of (g where |g| is among the ceil(ratio * n) largest, else 0).
    Use it: a hundredfold and more on slow links; the exact selection is the most expensive part (dgc samples).
    Costs: 8 bytes per value sent (5 with `| int8`); one residual tensor; a selection over the gradient.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}: use a number above 0 and up to 1")
    return (yield Merge(grad, coder(_encode, decode, residual_encoder=_encode_residual, ratio=float(ratio))))
