"""Triton: two-bit codes by threshold (tbq) or by chance (terngrad), with or without a residual, and back."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"
# ruff: noqa: SIM108

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels import rng
from syncline.codecs.kernels.adjacent import adjacent
from syncline.codecs.kernels.gpu_launch import launch
from syncline.codecs.kernels.gpu_moments import finished, partial_moments, scales
from syncline.codecs.kernels.gpu_random import random_unit
from syncline.codecs.kernels.gpu_tile import load_sum, load_tile, store_sum, store_tile
from syncline.codecs.kernels.segments import chunk_table, packed_bytes

# Bytes of output per program, warps.
ENCODE = (512, 4)
DECODE = (1024, 4)
# The same for terngrad, and the most programs.
CHANCE = (1024, 4)
PROGRAMS = 132 * 8


@triton.jit(do_not_specialize=["n", "k0", "k1"])
def _ternary_encode(
    x_ptr,
    residual_ptr,
    scale_ptr,
    packed_ptr,
    rest_ptr,
    table_ptr,
    n,
    k0,
    k1,
    CHANCE: tl.constexpr,
    TABLE: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    BYTES: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    if TABLE:
        start = tl.load(table_ptr + pid * 5)
        count = tl.load(table_ptr + pid * 5 + 1).to(tl.int32)
        byte = tl.load(table_ptr + pid * 5 + 2)
        scale = tl.load(scale_ptr + tl.load(table_ptr + pid * 5 + 3))
        counter = tl.load(table_ptr + pid * 5 + 4)
    else:
        start = pid * (BYTES * 4)
        count = tl.minimum(n - start, BYTES * 4).to(tl.int32)
        byte = pid * BYTES
        scale = tl.load(scale_ptr)
        counter = start
    row = tl.arange(0, BYTES)
    place = tl.arange(0, 4)
    local = row[:, None] * 4 + place[None, :]
    x = load_sum(x_ptr, residual_ptr, start, local, count, ADD, BYTES * 4)
    if CHANCE:
        limit = random_unit(counter, local, k0, k1) * scale
    else:
        limit = tl.zeros([BYTES, 4], dtype=tl.float32) + scale
    code = tl.where(x > limit, 1, tl.where(x < -limit, 3, 0))
    code = tl.where(tl.abs(x) < float("inf"), code, 2)
    code = tl.where(local < count, code, 0)
    bits = tl.sum(code << (place[None, :] * 2), axis=1)
    tl.store(packed_ptr + byte + row, bits.to(tl.uint8), mask=row * 4 < count)
    if KEEP:
        store_tile(rest_ptr + start, local, x - _unit(code) * scale, count, BYTES * 4)


@triton.jit(do_not_specialize=["n", "clip", "programs", "k0", "k1"])
def _terngrad(
    x_ptr,
    sums_ptr,
    peaks_ptr,
    packed_ptr,
    scale_ptr,
    n,
    clip,
    programs,
    k0,
    k1,
    SIZE: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Every program finishes the moments for itself: that costs less than another launch."""
    pid = tl.program_id(0)
    row = tl.arange(0, BYTES)
    place = tl.arange(0, 4)
    local = row[:, None] * 4 + place[None, :]
    start = pid.to(tl.int64) * (BYTES * 4)
    # The first values travel while the moments are finished, later ones while those before are coded.
    count = tl.minimum(n - start, BYTES * 4).to(tl.int32)
    x = load_tile(x_ptr + start, local, count, BYTES * 4).to(tl.float32)
    part = tl.arange(0, SIZE)
    inside = part < programs
    total = tl.sum(tl.load(sums_ptr + part, mask=inside, other=0.0), axis=0)
    square = tl.sum(tl.load(sums_ptr + programs + part, mask=inside, other=0.0), axis=0)
    peak = tl.max(tl.load(peaks_ptr + part, mask=inside, other=0), axis=0)
    _mean, _deviation, _largest, scale = finished(total, square, peak, n.to(tl.float64), clip)
    if pid == 0:
        tl.store(scale_ptr, scale)
    while start < n:
        limit = random_unit(start, local, k0, k1) * scale
        code = tl.where(x > limit, 1, tl.where(x < -limit, 3, 0))
        code = tl.where(tl.abs(x) < float("inf"), code, 2)
        code = tl.where(local < count, code, 0)
        bits = tl.sum(code << (place[None, :] * 2), axis=1)
        tl.store(packed_ptr + start // 4 + row, bits.to(tl.uint8), mask=row * 4 < count)
        start += tl.num_programs(0).to(tl.int64) * (BYTES * 4)
        count = tl.minimum(n - start, BYTES * 4).to(tl.int32)
        x = load_tile(x_ptr + start, local, count, BYTES * 4).to(tl.float32)


@triton.jit
def _unit(code):
    """0, 1, nan and -1 for the codes 0 to 3."""
    return tl.where(code == 2, float("nan"), ((code ^ 2) - 2).to(tl.float32))


@triton.jit(do_not_specialize=["n", "divisor"])
def _ternary_decode(
    packed_ptr, scale_ptr, table_ptr, out_ptr, n, divisor, TABLE: tl.constexpr, ONTO: tl.constexpr, BYTES: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    if TABLE:
        start = tl.load(table_ptr + pid * 5)
        count = tl.load(table_ptr + pid * 5 + 1).to(tl.int32)
        byte = tl.load(table_ptr + pid * 5 + 2)
        scale = tl.load(scale_ptr + tl.load(table_ptr + pid * 5 + 3))
    else:
        start = pid * (BYTES * 4)
        count = tl.minimum(n - start, BYTES * 4).to(tl.int32)
        byte = pid * BYTES
        scale = tl.load(scale_ptr)
    row = tl.arange(0, BYTES)
    place = tl.arange(0, 4)
    bits = tl.load(packed_ptr + byte + row, mask=row * 4 < count, other=0).to(tl.int32)
    local = row[:, None] * 4 + place[None, :]
    code = (bits[:, None] >> (place[None, :] * 2)) & 3
    # 0 * scale and not 0, so that a scale that is not finite shows everywhere.
    store_sum(out_ptr + start, local, _unit(code) * scale, count, divisor, ONTO, BYTES * 4)


def ternary_encode(
    x: Tensor,
    scale: Tensor,
    seed: int | None,
    lengths: tuple[int, ...] | None,
    config: tuple[int, int] = ENCODE,
) -> Tensor:
    """Codes by threshold `scale`, or with a seed by chance |x| / scale; with lengths, one scale per tensor."""
    return _encode(x, None, None, scale, seed, lengths, config)


def terngrad(
    x: Tensor, clip: float, seed: int, lengths: tuple[int, ...] | None, config: tuple[int, int] = CHANCE
) -> tuple[Tensor, Tensor]:
    """See `pieces.terngrad`."""
    n, (size, warps) = x.numel(), config
    if lengths is not None or not n:
        scale = scales(x, clip, (n,) if lengths is None else lengths)
        return _encode(x, None, None, scale, seed, lengths, ENCODE), scale
    sums, peaks = partial_moments(x)
    packed, scale = adjacent(x.device, (((n + 3) // 4,), torch.uint8), ((1,), torch.float32))
    k0, k1 = rng.keys(seed)
    programs = min(PROGRAMS, triton.cdiv(n, size * 4))
    tensors, modes = (x, sums, peaks, packed, scale), {"SIZE": triton.next_power_of_2(peaks.numel()), "BYTES": size}
    launch(_terngrad, programs, *tensors, n, clip, peaks.numel(), k0, k1, **modes, warps=warps)
    return packed, scale


def ternary_residual(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    seed: int | None,
    lengths: tuple[int, ...] | None,
    config: tuple[int, int] = ENCODE,
) -> tuple[Tensor, Tensor]:
    """See `pieces.ternary_residual`, in one pass."""
    rest = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
    return _encode(x, residual, rest, scale, seed, lengths, config), rest


def _encode(
    x: Tensor,
    residual: Tensor | None,
    rest: Tensor | None,
    scale: Tensor,
    seed: int | None,
    lengths: tuple[int, ...] | None,
    config: tuple[int, int],
) -> Tensor:
    n, (size, warps) = x.numel(), config
    total = (n + 3) // 4 if lengths is None else packed_bytes(lengths, 2)
    packed = torch.empty(total, dtype=torch.uint8, device=x.device)
    if n == 0:
        return packed
    table = None if lengths is None else chunk_table(lengths, size * 4, 2, x.device)[0]
    programs = triton.cdiv(n, size * 4) if table is None else table.shape[0]
    k0, k1 = rng.keys(0 if seed is None else seed)
    modes = {"CHANCE": seed is not None, "TABLE": table is not None, "BYTES": size}
    modes |= {"ADD": residual is not None, "KEEP": rest is not None}
    tensors = (x, residual, scale, packed, rest, table)
    # No fused multiply-add: the rest then rounds as it does in the reference.
    launch(_ternary_encode, programs, *tensors, n, k0, k1, **modes, warps=warps, fusion=False)
    return packed


def ternary_decode(
    packed: Tensor,
    scale: Tensor,
    count: int,
    lengths: tuple[int, ...] | None,
    config: tuple[int, int] = DECODE,
) -> Tensor:
    """See `plain.ternary_decode`; with lengths, one scale per tensor."""
    out = torch.empty(count, dtype=torch.float32, device=packed.device)
    _decode(packed, scale, lengths, out, None, config)
    return out


def ternary_onto(packed: Tensor, scale: Tensor, lengths: tuple[int, ...] | None, total: Tensor, divisor: float) -> None:
    """See `pieces.ternary_onto`, in one pass."""
    _decode(packed, scale, lengths, total, divisor, DECODE)


def _decode(
    packed: Tensor,
    scale: Tensor,
    lengths: tuple[int, ...] | None,
    out: Tensor,
    divisor: float | None,
    config: tuple[int, int],
) -> None:
    count, (size, warps) = out.numel(), config
    if count == 0:
        return
    table = None if lengths is None else chunk_table(lengths, size * 4, 2, packed.device)[0]
    programs = triton.cdiv(count, size * 4) if table is None else table.shape[0]
    modes = {"TABLE": table is not None, "ONTO": divisor is not None, "BYTES": size}
    # No fused multiply-add: the sum then rounds as it does in the reference.
    numbers = (count, divisor or 1.0)
    launch(_ternary_decode, programs, packed, scale, table, out, *numbers, **modes, warps=warps, fusion=False)
