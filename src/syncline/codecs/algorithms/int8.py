"""int8: 8-bit integers with one scale per block."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Coder, Payload
from syncline.codecs.coder import coder as make
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State


def encode(x: Tensor, *, bits: int, block: int) -> Payload:
    """Steps of each block's largest magnitude; int4 sends the same."""
    return ops.quantize_blocks(x, bits=bits, block=block)


def encode_residual(x: Tensor, residual: Tensor | None, *, bits: int, block: int) -> tuple[Payload, Tensor]:
    """The same of x + residual, and the new residual."""
    packed, scales, rest = ops.quantize_residual(x, residual, bits=bits, block=block)
    return (packed, scales), rest


def decode(
    payload: Payload, count: int, *, bits: int, block: int, onto: Tensor | None = None, divisor: int = 1
) -> Tensor:
    """The values of such steps; int4 and qsgd send the same."""
    packed, scales = payload
    return ops.dequantize_blocks(packed, scales, bits=bits, block=block, count=count, onto=onto, divisor=divisor)


def coder(*, block: int = 256) -> Coder:
    """The coder that writes 8-bit steps and a float32 scale for every `block` values."""
    return make(encode, decode, residual_encoder=encode_residual, bits=8, block=block)


@codec("int8", feedback=True, direct=True, carries="scales", tail=coder, takes=("gradient", "values", "factors"))
def int8(grad: Tensor, state: State, *, block: int = 256) -> Merges:
    """Round to 8-bit steps of each block's largest magnitude.

    Paper: T. Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016 (here linear, block-wise).
    Formula: s_b = max|g_b| / 127; q = round(g / s_b); out = mean of q * s_b.
    Use it: a safe fourfold reduction, alone or after a sparsifier or a low-rank codec.
    Costs: 1 byte per value and 4 bytes per block; one residual tensor; one pass over the gradient.
    """
    return (yield Merge(grad, coder(block=block)))
