"""Triton: mean, standard deviation and largest magnitude, from one read of the tensor; many tensors in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels.gpu_launch import launch
from syncline.codecs.kernels.gpu_tile import load_tile
from syncline.codecs.kernels.segments import chunk_table

# Values per program and iteration, warps. The sums follow the tile and the number of programs, so both are fixed:
# ranks that chose differently would disagree in the last bit.
CONFIG = (4096, 8)
PROGRAMS = 512
# Values of a chunk where several tensors share a launch; many are small.
CHUNK = (4096, 4)


@triton.jit
def _add_tile(x, total, square, peak):
    """Sums in float64: squares of float32 neither overflow nor vanish there, and nothing cancels that matters."""
    wide = x.to(tl.float64)
    total += tl.sum(wide, axis=1)
    square += tl.sum(wide * wide, axis=1)
    # As integers nan is the largest.
    peak = tl.maximum(peak, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    return total, square, peak


@triton.jit(do_not_specialize=["n"])
def _moments(x_ptr, sums_ptr, peaks_ptr, table_ptr, n, TABLE: tl.constexpr, TILE: tl.constexpr):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    local = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    total = tl.zeros([TILE // 4], dtype=tl.float64)
    square = tl.zeros([TILE // 4], dtype=tl.float64)
    peak = tl.zeros([TILE // 4], dtype=tl.int32)
    if TABLE:
        start = tl.load(table_ptr + pid.to(tl.int64) * 5)
        count = tl.load(table_ptr + pid.to(tl.int64) * 5 + 1).to(tl.int32)
        x = load_tile(x_ptr + start, local, count, TILE).to(tl.float32)
        total, square, peak = _add_tile(x, total, square, peak)
    else:
        start = pid.to(tl.int64) * TILE
        while start < n:
            count = tl.minimum(n - start, TILE).to(tl.int32)
            x = load_tile(x_ptr + start, local, count, TILE).to(tl.float32)
            total, square, peak = _add_tile(x, total, square, peak)
            start += programs.to(tl.int64) * TILE
    tl.store(sums_ptr + pid, tl.sum(total, axis=0))
    tl.store(sums_ptr + programs + pid, tl.sum(square, axis=0))
    tl.store(peaks_ptr + pid, tl.max(peak, axis=0))


@triton.jit
def finished(total, square, peak, n, clip):
    """Mean, deviation, largest magnitude, and the smaller of that and `clip` deviations (0: no clipping)."""
    mean = total / n
    variance = square / n - mean * mean
    variance = tl.where(variance < 0, 0.0, variance)  # not maximum, which would lose nan
    deviation = tl.sqrt(variance).to(tl.float32)
    largest = peak.to(tl.float32, bitcast=True)
    bound = deviation * clip
    scale = tl.where((clip == 0) | (largest < bound), largest, bound)
    return mean.to(tl.float32), deviation, largest, scale


@triton.jit(do_not_specialize=["n", "clip", "programs", "pieces"])
def _finish(sums_ptr, peaks_ptr, pieces_ptr, out_ptr, n, clip, programs, pieces, TABLE: tl.constexpr):
    piece = tl.program_id(0)
    if TABLE:
        base = tl.load(pieces_ptr + piece * 3)
        last = tl.load(pieces_ptr + piece * 3 + 1)
        length = tl.load(pieces_ptr + piece * 3 + 2).to(tl.float64)
    else:
        base = piece.to(tl.int64)
        last = base + programs
        length = n.to(tl.float64)
    local = tl.arange(0, 512)
    total = tl.zeros([512], dtype=tl.float64)
    square = tl.zeros([512], dtype=tl.float64)
    peak = tl.zeros([512], dtype=tl.int32)
    while base < last:  # not range: the interpreter cannot run one with bounds from memory
        inside = base + local < last
        total += tl.load(sums_ptr + base + local, mask=inside, other=0.0)
        square += tl.load(sums_ptr + programs + base + local, mask=inside, other=0.0)
        peak = tl.maximum(peak, tl.load(peaks_ptr + base + local, mask=inside, other=0))
        base += 512
    total_sum = tl.sum(total, axis=0)
    square_sum = tl.sum(square, axis=0)
    bits = tl.max(peak, axis=0)
    mean, deviation, largest, scale = finished(total_sum, square_sum, bits, tl.maximum(length, 1.0), clip)
    tl.store(out_ptr + piece, mean)
    tl.store(out_ptr + pieces + piece, deviation)
    tl.store(out_ptr + 2 * pieces + piece, largest)
    tl.store(out_ptr + 3 * pieces + piece, scale)


def partial_moments(x: Tensor, config: tuple[int, int] = CONFIG) -> tuple[Tensor, Tensor]:
    """Sums and sums of squares of every program, and the bits of their largest magnitudes; x is not empty."""
    n, (tile, warps) = x.numel(), config
    programs = min(PROGRAMS, triton.cdiv(n, tile))
    sums = torch.empty(2 * programs, dtype=torch.float64, device=x.device)
    peaks = torch.empty(programs, dtype=torch.int32, device=x.device)
    launch(_moments, programs, x, sums, peaks, None, n, TABLE=False, TILE=tile, warps=warps)
    return sums, peaks


def moments(x: Tensor, config: tuple[int, int] = CONFIG) -> Tensor:
    """See `plain.moments`."""
    out = torch.empty((4, 1), dtype=torch.float32, device=x.device)
    if not x.numel():
        return out.zero_()[:3, 0]
    sums, peaks = partial_moments(x, config)
    launch(_finish, 1, sums, peaks, None, out, x.numel(), 0.0, peaks.numel(), 1, TABLE=False, warps=4)
    return out[:3, 0]


def scales(x: Tensor, clip: float, lengths: tuple[int, ...]) -> Tensor:
    """For each tensor its largest magnitude, or `clip` deviations where that is less."""
    out = torch.empty((4, len(lengths)), dtype=torch.float32, device=x.device)
    if not x.numel():
        return out.zero_()[3]
    tile, warps = CHUNK
    table, ranges = chunk_table(lengths, tile, 2, x.device)
    programs = table.shape[0]
    sums = torch.empty(2 * programs, dtype=torch.float64, device=x.device)
    peaks = torch.empty(programs, dtype=torch.int32, device=x.device)
    launch(_moments, programs, x, sums, peaks, table, x.numel(), TABLE=True, TILE=tile, warps=warps)
    sizes = (x.numel(), clip, programs, len(lengths))
    launch(_finish, len(lengths), sums, peaks, ranges, out, *sizes, TABLE=True, warps=4)
    return out[3]
