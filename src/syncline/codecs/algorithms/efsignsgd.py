"""efsignsgd: the sign, times the mean magnitude."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _decode(payload: Payload, count: int) -> Tensor:
    packed, scale = payload
    return ops.sign_decode(packed, scale, -scale, count)


CODER = coder(ops.sign_encode_l1, _decode)


@codec("efsignsgd", feedback=True, carries="scales")
def efsignsgd(grad: Tensor, state: State) -> Merges:
    """Send the sign and one scale, the mean magnitude.

    Paper: S. Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019.
    Formula: out = mean of sign(g) * ||g||_1 / n, with sign(0) = 1.
    Use it: like onebit, with a convergence proof; better than onebit where gradients are symmetric.
    Costs: 1 bit per value and 4 bytes; one residual tensor; two passes over the gradient.
    """
    return (yield Merge(grad, CODER))
