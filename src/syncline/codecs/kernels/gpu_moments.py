"""Triton: mean, standard deviation and largest magnitude, from one read of the tensor."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels.gpu_tile import load_tile

# Values per program and iteration, warps. The sums follow the tile and the number of programs, so both are fixed:
# ranks that chose differently would disagree in the last bit.
CONFIG = (2048, 4)
PROGRAMS = 132 * 8


@triton.jit(do_not_specialize=["n"])
def _moments(x_ptr, sums_ptr, peaks_ptr, n, TILE: tl.constexpr):
    """Sums in float64: squares of float32 neither overflow nor vanish there, and nothing cancels that matters."""
    pid = tl.program_id(0)
    row = tl.arange(0, TILE // 4)
    local = row[:, None] * 4 + tl.arange(0, 4)[None, :]
    total = tl.zeros([TILE // 4], dtype=tl.float64)
    square = tl.zeros([TILE // 4], dtype=tl.float64)
    peak = tl.zeros([TILE // 4], dtype=tl.int32)
    start = pid.to(tl.int64) * TILE
    while start < n:
        count = tl.minimum(n - start, TILE).to(tl.int32)
        x = load_tile(x_ptr + start, local, count, TILE).to(tl.float32)
        wide = x.to(tl.float64)
        total += tl.sum(wide, axis=1)
        square += tl.sum(wide * wide, axis=1)
        # As integers nan is the largest.
        peak = tl.maximum(peak, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
        start += tl.num_programs(0).to(tl.int64) * TILE
    tl.store(sums_ptr + pid, tl.sum(total, axis=0))
    tl.store(sums_ptr + tl.num_programs(0) + pid, tl.sum(square, axis=0))
    tl.store(peaks_ptr + pid, tl.max(peak, axis=0))


@triton.jit(do_not_specialize=["n", "programs"])
def _finish(sums_ptr, peaks_ptr, out_ptr, n, programs, SIZE: tl.constexpr):
    part = tl.arange(0, SIZE)
    inside = part < programs
    mean = tl.sum(tl.load(sums_ptr + part, mask=inside, other=0.0), axis=0) / n
    square = tl.sum(tl.load(sums_ptr + programs + part, mask=inside, other=0.0), axis=0) / n
    variance = square - mean * mean
    variance = tl.where(variance < 0, 0.0, variance)  # not maximum, which would lose nan
    peak = tl.max(tl.load(peaks_ptr + part, mask=inside, other=0), axis=0)
    tl.store(out_ptr, mean.to(tl.float32))
    tl.store(out_ptr + 1, tl.sqrt(variance).to(tl.float32))
    tl.store(out_ptr + 2, peak.to(tl.float32, bitcast=True))


def moments(x: Tensor, config: tuple[int, int] = CONFIG) -> Tensor:
    """See `plain.moments`."""
    n, (tile, warps) = x.numel(), config
    if n == 0:
        return torch.zeros(3, dtype=torch.float32, device=x.device)
    programs = min(PROGRAMS, triton.cdiv(n, tile))
    sums = torch.empty(2 * programs, dtype=torch.float64, device=x.device)
    peaks = torch.empty(programs, dtype=torch.int32, device=x.device)
    out = torch.empty(3, dtype=torch.float32, device=x.device)
    _moments[(programs,)](x, sums, peaks, n, TILE=tile, num_warps=warps)
    _finish[(1,)](sums, peaks, out, n, programs, SIZE=triton.next_power_of_2(programs), num_warps=8)
    return out
