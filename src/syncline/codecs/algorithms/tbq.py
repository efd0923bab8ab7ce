"""tbq: plus or minus a fixed threshold, or nothing."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _encode(x: Tensor, *, tau: float) -> Payload:
    return (ops.ternary_encode(x, threshold=tau),)


def _encode_residual(x: Tensor, residual: Tensor | None, *, tau: float) -> tuple[Payload, Tensor]:
    packed, rest = ops.ternary_residual(x, residual, threshold=tau)
    return (packed,), rest


def _decode(payload: Payload, count: int, *, tau: float, onto: Tensor | None = None, divisor: int = 1) -> Tensor:
    (packed,) = payload
    return ops.ternary_decode(packed, tau, count, onto=onto, divisor=divisor)


@codec("tbq", feedback=True, direct=True)
def tbq(grad: Tensor, state: State, *, tau: float = 0.001) -> Merges:
    """Send tau with the gradient's sign where its magnitude exceeds tau, else zero.

    Paper: N. Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015.
    Formula: out = mean of (tau * sign(g) where |g| > tau, else 0).
    Use it: when the size of the gradients is known and steady; tune tau near their typical size.
    Costs: 2 bits per value; one residual tensor; one pass over the gradient.
    """
    if not tau > 0:
        raise ValueError(f"tau is {tau}: use a number above 0")
    return (yield Merge(grad, coder(_encode, _decode, residual_encoder=_encode_residual, tau=float(tau))))
