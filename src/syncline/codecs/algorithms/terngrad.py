"""terngrad: minus one, zero or one, at random without bias."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def decode(
    payload: Payload, count: int, *, lengths: tuple[int, ...] | None, onto: Tensor | None = None, divisor: int = 1
) -> Tensor:
    """0, scale or -scale for each code, with one scale per tensor; tbq sends the same."""
    packed, scale = payload
    return ops.ternary_decode(packed, scale, count, lengths=lengths, onto=onto, divisor=divisor)


@codec("terngrad", direct=True, carries="scales")
def terngrad(grad: Tensor, state: State, *, clip: float = 2.5) -> Merges:
    """Send the sign with probability |g| / s, else zero; clipped at `clip` standard deviations (0: not at all).

    Paper: W. Wen et al., TernGrad: Ternary Gradients to Reduce Communication, NeurIPS 2017.
    Formula: s = max|g|; out = mean of s * sign(g) * b, b ~ Bernoulli(|g| / s).
    Use it: 16-fold without a residual (unbiased but for the clipping); many ranks average the noise away.
    Costs: 2 bits per value and 4 bytes; no state; two passes over the gradient and one random number per value.
    """
    if clip < 0:
        raise ValueError(f"clip is {clip}: use 0 (no clipping) or more")
    # Values beyond the scale are sent with probability 1, as if clipped: no extra pass is needed.
    return (yield Merge(grad, coder(ops.terngrad, decode, clip=float(clip), lengths=state.lengths), state.rank_seed))
