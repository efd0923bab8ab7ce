"""tbq: plus or minus a fixed threshold, or nothing."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _encode(x: Tensor, *, tau: float) -> Payload:
    return (ops.ternary_encode(x, threshold=tau),)


def _decode(payload: Payload, count: int, *, tau: float) -> Tensor:
    (packed,) = payload
    return ops.ternary_decode(packed, tau, count)


@codec("tbq", feedback=True, spread=True)
def tbq(grad: Tensor, state: State, *, tau: float = 0.001) -> Merges:
    """Send tau with the gradient's sign where its magnitude exceeds tau, else zero.

    Paper: N. Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015.
    Formula: out = mean of (tau * sign(g) where |g| > tau, else 0).
    Use it: when the size of the gradients is known and steady; tune tau near their typical size.
    Costs: 2 bits per value; one residual tensor; one pass over the gradient.
    """
    if not tau > 0:
        raise ValueError(f"tau is {tau}: use a number above 0")
    return (yield Merge(grad, coder(_encode, _decode, tau=float(tau))))
