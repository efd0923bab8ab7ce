"""Triton: put old values back if a flag on the device says so; else nothing is read or written."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels.gpu_launch import launch

_TILE = 2048
# In the usual case every program ends at once, so there are only as many as keep the device busy.
_PROGRAMS = 132 * 4


@triton.jit(do_not_specialize=["n"])
def _keep_if(good_ptr, new_ptr, old_ptr, n, ZERO: tl.constexpr, TILE: tl.constexpr):
    if tl.load(good_ptr).to(tl.int32) == 0:
        local = tl.arange(0, TILE)
        start = tl.program_id(0).to(tl.int64) * TILE
        while start < n:
            inside = start + local < n
            if ZERO:
                old = tl.zeros([TILE], dtype=new_ptr.dtype.element_ty)
            else:
                old = tl.load(old_ptr + start + local, mask=inside)
            tl.store(new_ptr + start + local, old, mask=inside)
            start += tl.num_programs(0).to(tl.int64) * TILE


def keep_if(good: Tensor, new: Tensor, old: Tensor | None) -> None:
    """See `plain.keep_if`."""
    n = new.numel()
    if n:
        programs, modes = min(_PROGRAMS, triton.cdiv(n, _TILE)), {"ZERO": old is None, "TILE": _TILE}
        launch(_keep_if, programs, good, new, old, n, **modes, warps=4)
