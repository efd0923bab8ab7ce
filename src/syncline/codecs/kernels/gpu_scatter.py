"""Triton: add values at positions that do not repeat, in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels.gpu_launch import launch

_TILE = 512


@triton.jit(do_not_specialize=["n", "count"])
def _scatter(out_ptr, indices_ptr, values_ptr, n, count, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    index = tl.load(indices_ptr + place, mask=inside, other=0).to(tl.int64)
    value = tl.load(values_ptr + place, mask=inside, other=0.0).to(tl.float32)
    # Unused slots all say position 0, with value 0.
    inside = inside & (value != 0) & (index >= 0) & (index < n)
    old = tl.load(out_ptr + index, mask=inside, other=0.0)
    tl.store(out_ptr + index, (old + value).to(out_ptr.dtype.element_ty), mask=inside)


def scatter_unique(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """See `sparse.scatter_unique`; float32."""
    count = values.numel()
    if count:
        launch(_scatter, triton.cdiv(count, _TILE), out, indices, values, out.numel(), count, TILE=_TILE, warps=4)
