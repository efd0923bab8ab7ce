"""efsignsgd: the sign, times the mean magnitude."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _decode(
    payload: Payload, count: int, *, lengths: tuple[int, ...] | None, onto: Tensor | None = None, divisor: int = 1
) -> Tensor:
    packed, scale = payload
    return ops.sign_decode(packed, scale, -scale, count, lengths=lengths, onto=onto, divisor=divisor)


def _encode_residual(x: Tensor, residual: Tensor | None, *, lengths: tuple[int, ...] | None) -> tuple[Payload, Tensor]:
    packed, scale, rest = ops.sign_residual_l1(x, residual, lengths=lengths)
    return (packed, scale), rest


@codec("efsignsgd", feedback=True, direct=True, carries="scales")
def efsignsgd(grad: Tensor, state: State) -> Merges:
    """Send the sign and one scale, the mean magnitude.

    Paper: S. Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019.
    Formula: out = mean of sign(g) * ||g||_1 / n, with sign(0) = 1.
    Use it: like onebit, with a convergence proof; better than onebit where gradients are symmetric.
    Costs: 1 bit per value and 4 bytes; one residual tensor; two passes over the gradient.
    """
    code = coder(ops.sign_encode_l1, _decode, residual_encoder=_encode_residual, lengths=state.lengths)
    return (yield Merge(grad, code))
