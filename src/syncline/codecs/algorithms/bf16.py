"""bf16: half the bytes by rounding."""

import torch
from torch import Tensor

from syncline.codecs.coder import cast
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State

CODER = cast(torch.bfloat16)


@codec("bf16", direct=True, tail=lambda: CODER, takes=("gradient", "values", "factors", "scales"))
def bf16(grad: Tensor, state: State) -> Merges:
    """Round to bfloat16: float32's range with 8 bits of precision.

    Paper: D. Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019.
    Formula: out = sum over ranks of bf16(g / N).
    Use it: nearly always safe; the baseline that other compressors have to beat.
    Costs: 2 bytes per value, no state. An all-reduce also sums in bfloat16; gathering exchanges sum in float32.
    """
    return (yield Merge(grad, CODER))
