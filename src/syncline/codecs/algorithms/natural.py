"""natural: a neighbouring power of two, at random without bias."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _encode(x: Tensor, *, seed: int) -> Payload:
    return (ops.natural_encode(x, seed=seed),)


def _decode(payload: Payload, count: int, *, onto: Tensor | None = None, divisor: int = 1) -> Tensor:
    (codes,) = payload
    return ops.natural_decode(codes, count, onto=onto, divisor=divisor)


CODER = coder(_encode, _decode)


@codec("natural", direct=True)
def natural(grad: Tensor, state: State) -> Merges:
    """Round up or down at random to a power of two and send sign and exponent in one byte.

    Paper: S. Horvath et al., Natural Compression for Distributed Deep Learning, 2019.
    Formula: out = mean of sign(g) * 2**e; 2**e is the power below with probability (2**(e+1) - |g|) / 2**e.
    Use it: fourfold without scales or state, over any range of sizes; its variance is at most 1/8 of g**2.
    Costs: 1 byte per value (exponents -75 to 50; smaller is zero); no state; one random number per value.
    """
    return (yield Merge(grad, CODER, state.rank_seed))
