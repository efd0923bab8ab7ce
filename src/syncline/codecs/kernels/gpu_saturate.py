"""Triton: values within a limit, times a factor, in another dtype, in one pass."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels.gpu_launch import launch
from syncline.codecs.kernels.gpu_tile import load_tile, store_tile

# Values per program, warps.
CONFIG = (2048, 4)


@triton.jit(do_not_specialize=["n", "limit", "factor"])
def _saturate(x_ptr, out_ptr, n, limit, factor, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    local = tl.arange(0, TILE)
    count = tl.minimum(n - start, TILE).to(tl.int32)
    x = load_tile(x_ptr + start, local, count, TILE).to(tl.float32)
    inf = float("inf")
    x = tl.where((x > limit) & (x < inf), limit, tl.where((x < -limit) & (x > -inf), -limit, x))
    store_tile(out_ptr + start, local, (x * factor).to(out_ptr.dtype.element_ty), count, TILE)


def saturate(
    x: Tensor, limit: float, dtype: torch.dtype, factor: float = 1.0, config: tuple[int, int] = CONFIG
) -> Tensor:
    """See `plain.saturate`."""
    n, (tile, warps) = x.numel(), config
    out = torch.empty(n, dtype=dtype, device=x.device)
    if n:
        launch(_saturate, triton.cdiv(n, tile), x, out, n, limit, factor, TILE=tile, warps=warps)
    return out
