"""int4: 4-bit integers with one scale per block."""

from torch import Tensor

from syncline.codecs.algorithms.int8 import decode, encode, encode_residual
from syncline.codecs.coder import Coder
from syncline.codecs.coder import coder as make
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def coder(*, block: int = 64) -> Coder:
    """The coder that writes 4-bit steps and a float32 scale for every `block` values."""
    return make(encode, decode, residual_encoder=encode_residual, bits=4, block=block)


@codec("int4", feedback=True, direct=True, carries="scales", tail=coder, takes=("gradient", "values", "factors"))
def int4(grad: Tensor, state: State, *, block: int = 64) -> Merges:
    """Round to 4-bit steps of each block's largest magnitude.

    Paper: T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022 (here linear, 4 bits).
    Formula: s_b = max|g_b| / 7; q = round(g / s_b); out = mean of q * s_b.
    Use it: where eightfold is needed and the gradient is too spread out for top-k.
    Costs: half a byte per value and 4 bytes per block; one residual tensor; one pass over the gradient.
    """
    return (yield Merge(grad, coder(block=block)))
