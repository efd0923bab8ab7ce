"""threshold: every value above a fixed size, as far as they fit."""

import math

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Out, Steps
from syncline.codecs.state import State


def encode(x: Tensor, *, tau: float, capacity: float) -> Payload:
    values, indices, _ = ops.compact(x, threshold=tau, capacity=math.ceil(capacity * x.numel()))
    return values, indices


def decode(payload: Payload, count: int, *, tau: float, capacity: float) -> Tensor:
    values, indices = payload
    return ops.densify(values, indices, count)


@codec("threshold", feedback=True, carries="values", spread=True)
def threshold(grad: Tensor, state: State, *, tau: float = 0.001, capacity: float = 0.05) -> Steps:
    """Send the values of magnitude `tau` and more, at most `capacity` of all; what does not fit waits.

    Paper: A. Dutta et al., On the Discrepancy between Theoretical Analysis and Practical Implementations of
    Compressed Communication, AAAI 2020 (hard threshold).
    Formula: out = mean of (g where |g| >= tau, else 0), in order of position up to ceil(capacity * n) values.
    Use it: when the size of the gradients is known; one pass, no selection. Messages have a fixed size.
    Costs: 8 bytes for each of capacity * n slots, used or not; one residual tensor; one pass.
    """
    if not tau >= 0 or not 0 < capacity <= 1:
        raise ValueError(f"tau is {tau}, capacity {capacity}: use tau >= 0 and a capacity above 0 and up to 1")
    out: Out = yield Merge(grad, coder(encode, decode, tau=float(tau), capacity=float(capacity)))
    return out
