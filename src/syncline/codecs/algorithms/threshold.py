"""threshold: every value above a fixed magnitude, up to a capacity."""

import math

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.algorithms.graddrop import SMALLEST, decode, leaving_rest
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _encode(x: Tensor, *, tau: float, capacity: float, seed: int) -> Payload:
    # If more values reach tau than fit, send the largest: taking them by position would never send the last ones.
    fits = ops.sampled_threshold(x, ratio=capacity, seed=seed)
    slots = math.ceil(capacity * x.numel())
    values, indices, _ = ops.compact(x, threshold=fits.clamp(min=max(tau, SMALLEST)), capacity=slots)
    return values, indices


_encode_residual = leaving_rest(_encode)


@codec("threshold", feedback=True, direct=True, carries="values", spread=True)
def threshold(grad: Tensor, state: State, *, tau: float = 0.001, capacity: float = 0.05) -> Merges:
    """Send the values of magnitude `tau` and more, at most a share `capacity` of all; the rest goes into the residual.

    Paper: A. Dutta et al., On the Discrepancy between Theoretical Analysis and Practical Implementations of
    Compressed Communication, AAAI 2020 (hard threshold).
    Formula: out = mean of (g where |g| >= t, else 0), t = max(tau, the (1 - capacity) quantile of |sample of g|).
    Use it: when the size of the gradients is known. Messages have a fixed size: keep the capacity tight.
    Costs: 8 bytes for each of capacity * n slots, used or not; one residual tensor; one pass and a small sort.
    """
    if not tau >= 0 or not 0 < capacity <= 1:
        raise ValueError(f"tau is {tau}, capacity {capacity}: use tau >= 0 and a capacity above 0 and up to 1")
    sparse = coder(_encode, decode, residual_encoder=_encode_residual, tau=float(tau), capacity=float(capacity))
    return (yield Merge(grad, sparse, state.rank_seed))
