"""int8: 8-bit integers with one scale per block."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Coder, Payload
from syncline.codecs.coder import coder as make
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Out, Steps
from syncline.codecs.state import State


def _encode(x: Tensor, *, block: int) -> Payload:
    return ops.quantize_blocks(x, bits=8, block=block)


def _decode(payload: Payload, count: int, *, block: int) -> Tensor:
    packed, scales = payload
    return ops.dequantize_blocks(packed, scales, bits=8, block=block, count=count)


def coder(*, block: int = 256) -> Coder:
    """The coder that writes 8-bit steps and a float32 scale for every `block` values."""
    return make(_encode, _decode, block=block)


@codec("int8", feedback=True, carries="scales", tail=coder, takes=("gradient", "values", "factors"))
def int8(grad: Tensor, state: State, *, block: int = 256) -> Steps:
    """Round to 8-bit steps of each block's largest magnitude.

    Paper: T. Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016 (here linear, block-wise).
    Formula: s_b = max|g_b| / 127; q = round(g / s_b); out = mean of q * s_b.
    Use it: a safe fourfold reduction, alone or after a sparsifier or a low-rank codec.
    Costs: 1 byte per value and 4 bytes per block; one residual tensor; two passes over the gradient.
    """
    out: Out = yield Merge(grad, coder(block=block))
    return out
