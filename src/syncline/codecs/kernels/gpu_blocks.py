"""Triton: block-wise quantisation with or without a residual, and back; packing and unpacking of 1, 2, 4 bits."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels import rng
from syncline.codecs.kernels.adjacent import adjacent
from syncline.codecs.kernels.gpu_launch import launch
from syncline.codecs.kernels.gpu_random import random_unit
from syncline.codecs.kernels.gpu_tile import load_sum, store_sum, store_tile
from syncline.codecs.kernels.plain import HUGE, TINY

_TINY = tl.constexpr(TINY)
_HUGE = tl.constexpr(HUGE)
# Values per program, warps.
ENCODE = (2048, 4)
RESIDUAL = (2048, 4)
DECODE = (4096, 4)
# Powers of two, so that a block is a row of a tile.
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@triton.jit(do_not_specialize=["n", "blocks", "k0", "k1"])
def _quantize(
    x_ptr,
    residual_ptr,
    packed_ptr,
    scales_ptr,
    rest_ptr,
    n,
    blocks,
    k0,
    k1,
    BITS: tl.constexpr,
    CHANCE: tl.constexpr,
    L2: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PER: tl.constexpr = 8 // BITS
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    pid = tl.program_id(0).to(tl.int64)
    start = pid * (ROWS * BLOCK)
    count = tl.minimum(n - start, ROWS * BLOCK).to(tl.int32)
    row = tl.arange(0, ROWS)
    local = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = load_sum(x_ptr, residual_ptr, start, local, count, ADD, ROWS * BLOCK)
    # As integers magnitudes order as the floats do, with nan above inf: one reduction finds both.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    broken = largest >= 0x7F800000
    size = tl.where(broken, 0, largest).to(tl.float32, bitcast=True)
    x = tl.where(broken[:, None], 0.0, x)
    usable = size > _TINY
    if L2:
        unit = x * tl.where(usable, tl.div_rn(1.0, tl.where(usable, size, 1.0)), 0.0)[:, None]
        size = tl.minimum(size * tl.sqrt_rn(tl.sum(unit * unit, axis=1)), _HUGE)
    factor = tl.where(usable, tl.div_rn(TOP * 1.0, tl.where(usable, size, 1.0)), 0.0)
    steps = x * factor[:, None]
    if CHANCE:
        steps = tl.floor(steps + random_unit(start, local, k0, k1))
        steps = tl.minimum(tl.maximum(steps, -TOP * 1.0), TOP * 1.0)
    else:  # adding 1.5 * 2**23 rounds to the nearest integer, half to even
        steps = (steps + 12582912.0) - 12582912.0
    code = steps.to(tl.int32) & ((1 << BITS) - 1)
    blocks_here = tl.minimum(blocks - pid * ROWS, ROWS).to(tl.int32)
    scale = tl.div_rn(tl.where(broken, float("nan"), size), TOP * 1.0)
    tl.store(scales_ptr + pid * ROWS + row, scale, mask=row < blocks_here)
    if KEEP:
        store_tile(rest_ptr + start, local, x - steps * scale[:, None], count, ROWS * BLOCK)
    if PER == 1:
        store_tile(packed_ptr + start, local, code.to(tl.uint8), count, ROWS * BLOCK)
    else:
        place = tl.arange(0, PER)
        code = tl.where(local < count, code, 0)
        grouped = tl.reshape(code, [ROWS, BLOCK // PER, PER]) << (place * BITS)[None, None, :]
        byte = row[:, None] * (BLOCK // PER) + tl.arange(0, BLOCK // PER)[None, :]
        packed = tl.sum(grouped, axis=2).to(tl.uint8)
        store_tile(packed_ptr + start // PER, byte, packed, (count + PER - 1) // PER, ROWS * BLOCK // PER)


@triton.jit(do_not_specialize=["n", "blocks", "divisor"])
def _dequantize(
    packed_ptr,
    scales_ptr,
    out_ptr,
    n,
    blocks,
    divisor,
    BITS: tl.constexpr,
    ONTO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PER: tl.constexpr = 8 // BITS
    HALF: tl.constexpr = 1 << (BITS - 1)
    pid = tl.program_id(0).to(tl.int64)
    start = pid * (ROWS * BLOCK)
    count = tl.minimum(n - start, ROWS * BLOCK).to(tl.int32)
    row = tl.arange(0, ROWS)
    local = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    blocks_here = tl.minimum(blocks - pid * ROWS, ROWS).to(tl.int32)
    scale = tl.load(scales_ptr + pid * ROWS + row, mask=row < blocks_here, other=0.0)
    bytes_here = (count + PER - 1) // PER
    byte = row[:, None] * (BLOCK // PER) + tl.arange(0, BLOCK // PER)[None, :]
    if count == ROWS * BLOCK:
        packed = tl.load(packed_ptr + start // PER + byte)
    else:
        packed = tl.load(packed_ptr + start // PER + byte, mask=byte < bytes_here, other=0)
    if PER == 1:
        code = packed.to(tl.int32)
    else:
        place = tl.arange(0, PER)
        spread = packed.to(tl.int32)[:, :, None] >> (place * BITS)[None, None, :]
        code = tl.reshape(spread & ((1 << BITS) - 1), [ROWS, BLOCK])
    value = ((code ^ HALF) - HALF).to(tl.float32) * scale[:, None]
    store_sum(out_ptr + start, local, value, count, divisor, ONTO, ROWS * BLOCK)


@triton.jit(do_not_specialize=["n"])
def _pack(values_ptr, packed_ptr, n, BITS: tl.constexpr, BYTES: tl.constexpr):
    PER: tl.constexpr = 8 // BITS
    start = tl.program_id(0).to(tl.int64) * (BYTES * PER)
    count = tl.minimum(n - start, BYTES * PER).to(tl.int32)
    row = tl.arange(0, BYTES)
    place = tl.arange(0, PER)
    local = row[:, None] * PER + place[None, :]
    value = tl.load(values_ptr + start + local, mask=local < count, other=0).to(tl.int32) & ((1 << BITS) - 1)
    packed = tl.sum(value << (place * BITS)[None, :], axis=1)
    tl.store(packed_ptr + start // PER + row, packed.to(tl.uint8), mask=row * PER < count)


@triton.jit(do_not_specialize=["n"])
def _unpack(packed_ptr, out_ptr, n, BITS: tl.constexpr, BYTES: tl.constexpr):
    PER: tl.constexpr = 8 // BITS
    start = tl.program_id(0).to(tl.int64) * (BYTES * PER)
    count = tl.minimum(n - start, BYTES * PER).to(tl.int32)
    row = tl.arange(0, BYTES)
    place = tl.arange(0, PER)
    packed = tl.load(packed_ptr + start // PER + row, mask=row * PER < count, other=0).to(tl.int32)
    local = row[:, None] * PER + place[None, :]
    value = (packed[:, None] >> (place * BITS)[None, :]) & ((1 << BITS) - 1)
    tl.store(out_ptr + start + local, value.to(tl.uint8), mask=local < count)


def quantize_blocks(
    x: Tensor, bits: int, block: int, seed: int | None, l2: bool, config: tuple[int, int] = ENCODE
) -> tuple[Tensor, Tensor]:
    """See `plain.quantize_blocks`; bits 2, 4 or 8 and a block of `BLOCKS`."""
    return _encode(x, None, None, bits, block, seed, l2, config)


def quantize_residual(
    x: Tensor,
    residual: Tensor | None,
    bits: int,
    block: int,
    seed: int | None,
    l2: bool,
    config: tuple[int, int] = RESIDUAL,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `pieces.quantize_residual`, in one pass; bits 2, 4 or 8 and a block of `BLOCKS`."""
    rest = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
    packed, scales = _encode(x, residual, rest, bits, block, seed, l2, config)
    return packed, scales, rest


def _encode(
    x: Tensor,
    residual: Tensor | None,
    rest: Tensor | None,
    bits: int,
    block: int,
    seed: int | None,
    l2: bool,
    config: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    n, (values, warps) = x.numel(), config
    blocks = triton.cdiv(n, block)
    parts = (((n * bits + 7) // 8,), torch.uint8), ((blocks,), torch.float32)
    packed, scales = adjacent(x.device, *parts)
    if n:
        rows = max(1, values // block)
        k0, k1 = rng.keys(0 if seed is None else seed)
        modes = {"BITS": bits, "CHANCE": seed is not None, "L2": l2, "ROWS": rows, "BLOCK": block}
        modes |= {"ADD": residual is not None, "KEEP": rest is not None}
        # No fused multiply-add: the steps then round as they do in the reference.
        tensors = (x, residual, packed, scales, rest)
        programs = triton.cdiv(blocks, rows)
        launch(_quantize, programs, *tensors, n, blocks, k0, k1, **modes, warps=warps, fusion=False)
    return packed, scales


def dequantize_blocks(
    packed: Tensor, scales: Tensor, bits: int, block: int, count: int, config: tuple[int, int] = DECODE
) -> Tensor:
    """See `plain.dequantize_blocks`; bits 2, 4 or 8 and a block of `BLOCKS`."""
    out = torch.empty(count, dtype=torch.float32, device=packed.device)
    _decode(packed, scales, bits, block, out, None, config)
    return out


def dequantize_onto(packed: Tensor, scales: Tensor, bits: int, block: int, total: Tensor, divisor: float) -> None:
    """See `pieces.dequantize_onto`, in one pass; bits 2, 4 or 8 and a block of `BLOCKS`."""
    _decode(packed, scales, bits, block, total, divisor, DECODE)


def _decode(
    packed: Tensor, scales: Tensor, bits: int, block: int, out: Tensor, divisor: float | None, config: tuple[int, int]
) -> None:
    count, (values, warps) = out.numel(), config
    if count:
        rows, blocks = max(1, values // block), triton.cdiv(count, block)
        modes = {"BITS": bits, "ONTO": divisor is not None, "ROWS": rows, "BLOCK": block}
        sizes = (count, blocks, 1.0 if divisor is None else divisor)
        launch(_dequantize, triton.cdiv(blocks, rows), packed, scales, out, *sizes, **modes, warps=warps)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """See `plain.pack_bits`; bits 1, 2 or 4."""
    n = values.numel()
    packed = torch.empty((n * bits + 7) // 8, dtype=torch.uint8, device=values.device)
    if n:
        launch(_pack, triton.cdiv(packed.numel(), 1024), values, packed, n, BITS=bits, BYTES=1024, warps=4)
    return packed


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """See `plain.unpack_bits`; bits 1, 2 or 4."""
    out = torch.empty(count, dtype=torch.uint8, device=packed.device)
    if count:
        launch(_unpack, triton.cdiv(packed.numel(), 1024), packed, out, count, BITS=bits, BYTES=1024, warps=4)
    return out
