"""onebit: one bit per value, and the mean of the positive and of the negative values."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _decode(
    payload: Payload, count: int, *, lengths: tuple[int, ...] | None, onto: Tensor | None = None, divisor: int = 1
) -> Tensor:
    packed, positive, negative = payload
    return ops.sign_decode(packed, positive, negative, count, lengths=lengths, onto=onto, divisor=divisor)


def _encode_residual(x: Tensor, residual: Tensor | None, *, lengths: tuple[int, ...] | None) -> tuple[Payload, Tensor]:
    *payload, rest = ops.sign_residual(x, residual, lengths=lengths)
    return tuple(payload), rest


@codec("onebit", feedback=True, direct=True, carries="scales")
def onebit(grad: Tensor, state: State) -> Merges:
    """Send the sign; read it back as the mean of the values of that sign.

    Paper: F. Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014.
    Formula: out = mean of (mean(g[g >= 0]) where g >= 0, else mean(g[g < 0])).
    Use it: 32-fold with little arithmetic, for dense gradients; depends on its residual. Tensors that travel
    together have means of their own.
    Costs: 1 bit per value and 8 bytes; one residual tensor; two passes over the gradient.
    """
    code = coder(ops.sign_encode, _decode, residual_encoder=_encode_residual, lengths=state.lengths)
    return (yield Merge(grad, code))
