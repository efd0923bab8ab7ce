"""fp16: half the bytes by rounding."""

import torch
from torch import Tensor

from syncline.codecs.coder import cast
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State

CODER = cast(torch.float16)


@codec("fp16", direct=True, tail=lambda: CODER, takes=("gradient", "values", "factors", "scales"))
def fp16(grad: Tensor, state: State) -> Merges:
    """Round to float16: 11 bits of precision, values up to 64480; larger ones are clipped.

    Paper: P. Micikevicius et al., Mixed Precision Training, ICLR 2018; torch's `fp16_compress_hook`.
    Formula: out = sum over ranks of fp16(clip(g, +-64480) / N).
    Use it: when gradients are of moderate size (a loss scale can help); else bf16 is safer.
    Costs: 2 bytes per value, no state. An all-reduce also sums in float16.
    """
    return (yield Merge(grad, CODER))
