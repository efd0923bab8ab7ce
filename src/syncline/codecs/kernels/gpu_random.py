"""Triton: the counting random numbers of `rng`, and the natural codec's encode and decode."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels import rng
from syncline.codecs.kernels.gpu_launch import launch
from syncline.codecs.kernels.gpu_tile import load_tile, store_sum, store_tile
from syncline.codecs.kernels.plain import NATURAL_LOW

_M1 = tl.constexpr(rng.M1)
_M2 = tl.constexpr(rng.M2)
_M3 = tl.constexpr(rng.M3)
_GOLDEN = tl.constexpr(rng.GOLDEN)
_LOW = tl.constexpr(NATURAL_LOW)
_TILE = 2048


@triton.jit
def random_u32(start, local, k0, k1):
    """The hash of counters start + local; a tile never crosses a multiple of 2**32 (tiles are powers of two)."""
    low = (start & 0xFFFFFFFF).to(tl.uint32)
    high = (start >> 32).to(tl.uint32)
    x = local.to(tl.uint32) + (low + k0.to(tl.uint32))
    x = (x ^ (x >> 17)) * _M1
    x = (x ^ (x >> 11)) * _M2 + (k1.to(tl.uint32) + high * _GOLDEN)
    x = (x ^ (x >> 15)) * _M3
    return x ^ (x >> 14)


@triton.jit
def random_unit(start, local, k0, k1):
    """Float32 in [0, 1), as in `rng.uniform`."""
    bits = random_u32(start, local, k0, k1) >> 8
    # Through int32: the conversion of unsigned integers is slower, and 24 bits fit.
    return bits.to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["n", "k0", "k1"])
def _natural_encode(x_ptr, out_ptr, n, k0, k1, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    local = tl.arange(0, TILE)
    count = tl.minimum(n - start, TILE).to(tl.int32)
    x = load_tile(x_ptr + start, local, count, TILE).to(tl.float32)
    whole = x.to(tl.int32, bitcast=True)
    noise = (random_u32(start, local, k0, k1) & 0x7FFFFF).to(tl.int32)
    magnitude = whole & 0x7FFFFFFF
    # Unsigned, because the sum of a nan's bits and the noise may pass int32.
    exponent = ((magnitude.to(tl.uint32) + noise.to(tl.uint32)) >> 23).to(tl.int32)
    code = tl.minimum(tl.maximum(exponent - 127 - _LOW + 1, 0), 126)
    code = tl.where(magnitude >= 0x7F800000, 127, code) | ((whole >> 24) & 128)
    store_tile(out_ptr + start, local, code.to(tl.uint8), count, TILE)


@triton.jit(do_not_specialize=["n", "divisor"])
def _natural_decode(codes_ptr, out_ptr, n, divisor, ONTO: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    local = tl.arange(0, TILE)
    count = tl.minimum(n - start, TILE).to(tl.int32)
    code = load_tile(codes_ptr + start, local, count, TILE).to(tl.int32)
    low = code & 127
    value = tl.where(low > 0, (low - 1 + _LOW + 127) << 23, 0)
    value = tl.where(low == 127, 0x7FC00000, value)
    sign = ((code & 128) != 0).to(tl.int32) << 31
    store_sum(out_ptr + start, local, (value | sign).to(tl.float32, bitcast=True), count, divisor, ONTO, TILE)


def natural_encode(x: Tensor, seed: int, tile: int = _TILE, warps: int = 4) -> Tensor:
    """See `plain.natural_encode`."""
    out = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    if x.numel():
        k0, k1 = rng.keys(seed)
        launch(_natural_encode, triton.cdiv(x.numel(), tile), x, out, x.numel(), k0, k1, TILE=tile, warps=warps)
    return out


def natural_decode(codes: Tensor, tile: int = _TILE, warps: int = 4) -> Tensor:
    """See `plain.natural_decode`."""
    out = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    if codes.numel():
        programs, modes = triton.cdiv(codes.numel(), tile), {"ONTO": False, "TILE": tile}
        launch(_natural_decode, programs, codes, out, codes.numel(), 1.0, **modes, warps=warps)
    return out


def natural_onto(codes: Tensor, total: Tensor, divisor: float) -> None:
    """See `pieces.natural_onto`, in one pass."""
    if codes.numel():
        programs, modes = triton.cdiv(codes.numel(), _TILE), {"ONTO": True, "TILE": _TILE}
        launch(_natural_decode, programs, codes, total, codes.numel(), divisor, **modes, warps=4)
