"""int4: 4-bit integers with one scale per block."""

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Coder, Payload
from syncline.codecs.coder import coder as make
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Out, Steps
from syncline.codecs.state import State


def _encode(x: Tensor, *, block: int) -> Payload:
    return ops.quantize_blocks(x, bits=4, block=block)


def _decode(payload: Payload, count: int, *, block: int) -> Tensor:
    packed, scales = payload
    return ops.dequantize_blocks(packed, scales, bits=4, block=block, count=count)


def coder(*, block: int = 64) -> Coder:
    """The coder that writes 4-bit steps and a float32 scale for every `block` values."""
    return make(_encode, _decode, block=block)


@codec("int4", feedback=True, carries="scales", tail=coder, takes=("gradient", "values", "factors"))
def int4(grad: Tensor, state: State, *, block: int = 64) -> Steps:
    """Round to 4-bit steps of each block's largest magnitude.

    Paper: T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022 (here linear, 4 bits).
    Formula: s_b = max|g_b| / 7; q = round(g / s_b); out = mean of q * s_b.
    Use it: where eightfold is needed and the gradient is too spread out for top-k.
    Costs: half a byte per value and 4 bytes per block; one residual tensor; two passes over the gradient.
    """
    out: Out = yield Merge(grad, coder(block=block))
    return out
