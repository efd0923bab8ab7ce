"""qsgd: random levels of each block's norm, without bias."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.algorithms.int8 import decode
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def _encode(x: Tensor, *, bits: int, block: int, seed: int) -> Payload:
    return ops.qsgd_encode(x, bits=bits, block=block, seed=seed)


@codec("qsgd", direct=True, carries="scales")
def qsgd(grad: Tensor, state: State, *, bits: int = 4, block: int = 512) -> Merges:
    """Round up or down at random to one of 2**(bits-1) - 1 levels of the block's Euclidean norm.

    Paper: D. Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization, NeurIPS 2017.
    Formula: s = 2**(bits-1) - 1; out = mean of ||g_b|| * sign(g) * l / s, E[l] = s * |g| / ||g_b||.
    Use it: when the theory of unbiased quantisers is wanted; int8 and int4 with feedback err less.
    Costs: `bits` bits per value and 4 bytes per block; no state; one random number per value.
    """
    return (yield Merge(grad, coder(_encode, decode, bits=bits, block=block), state.rank_seed))
