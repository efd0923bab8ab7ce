"""tbq: plus or minus a threshold, or nothing; the threshold follows the gradient's size."""

import math

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.algorithms.terngrad import decode
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _encode(x: Tensor, *, tau: float, lengths: tuple[int, ...] | None) -> Payload:
    return ops.ternary_relative(x, None, tau=tau, lengths=lengths)[:2]


def _encode_residual(
    x: Tensor, rest: Tensor | None, *, tau: float, lengths: tuple[int, ...] | None
) -> tuple[Payload, Tensor]:
    packed, scale, rest = ops.ternary_relative(x, rest, tau=tau, lengths=lengths)
    return (packed, scale), rest


@codec("tbq", feedback=True, direct=True, carries="scales")
def tbq(grad: Tensor, state: State, *, tau: float = 1.5) -> Merges:
    """Send t with the gradient's sign where its magnitude exceeds t, else zero; t is `tau` times the mean magnitude.

    Paper: N. Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015 (there t is
    a constant, in the units of the gradient, and has to be tuned for each model).
    Formula: t = tau * ||g||_1 / n; out = mean of (t * sign(g) where |g| > t, else 0).
    Use it: 16-fold with one scale for each tensor; onebit sends half the bytes and errs as much.
    Costs: 2 bits per value and 4 bytes; one residual tensor; two passes over gradient and residual.
    """
    if not 0 < tau < math.inf:
        raise ValueError(f"tau is {tau}: use a number above 0")
    code = coder(_encode, decode, residual_encoder=_encode_residual, tau=float(tau), lengths=state.lengths)
    return (yield Merge(grad, code))
