"""Triton: two-bit codes by threshold (tbq) or by chance (terngrad), and back; many tensors in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"
# ruff: noqa: SIM108

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels import rng
from syncline.codecs.kernels.gpu_random import random_unit
from syncline.codecs.kernels.gpu_tile import load_tile, store_tile
from syncline.codecs.kernels.segments import chunk_table, packed_bytes

# Bytes of output per program, warps.
ENCODE = (1024, 4)
DECODE = (1024, 4)


@triton.jit(do_not_specialize=["n", "k0", "k1"])
def _ternary_encode(
    x_ptr, scale_ptr, packed_ptr, table_ptr, n, k0, k1, CHANCE: tl.constexpr, TABLE: tl.constexpr, BYTES: tl.constexpr
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
    x = load_tile(x_ptr + start, local, count, BYTES * 4).to(tl.float32)
    if CHANCE:
        limit = random_unit(counter, local, k0, k1) * scale
    else:
        limit = tl.zeros([BYTES, 4], dtype=tl.float32) + scale
    code = tl.where(x > limit, 1, tl.where(x < -limit, 3, 0))
    code = tl.where(x != x, 2, code)
    code = tl.where(local < count, code, 0)
    bits = tl.sum(code << (place[None, :] * 2), axis=1)
    tl.store(packed_ptr + byte + row, bits.to(tl.uint8), mask=row * 4 < count)


@triton.jit(do_not_specialize=["n"])
def _ternary_decode(packed_ptr, scale_ptr, table_ptr, out_ptr, n, TABLE: tl.constexpr, BYTES: tl.constexpr):
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
    unit = tl.where(code == 2, float("nan"), ((code ^ 2) - 2).to(tl.float32))
    store_tile(out_ptr + start, local, unit * scale, count, BYTES * 4)


def ternary_encode(
    x: Tensor,
    scale: Tensor,
    seed: int | None,
    lengths: tuple[int, ...] | None,
    config: tuple[int, int] = ENCODE,
) -> Tensor:
    """Codes by threshold `scale`, or with a seed by chance |x| / scale; with lengths, one scale per tensor."""
    n, (size, warps) = x.numel(), config
    total = (n + 3) // 4 if lengths is None else packed_bytes(lengths, 2)
    packed = torch.empty(total, dtype=torch.uint8, device=x.device)
    if n == 0:
        return packed
    table = None if lengths is None else chunk_table(lengths, size * 4, 2, x.device)[0]
    programs = triton.cdiv(n, size * 4) if table is None else table.shape[0]
    k0, k1 = rng.keys(0 if seed is None else seed)
    modes = {"CHANCE": seed is not None, "TABLE": table is not None, "BYTES": size}
    _ternary_encode[(programs,)](x, scale, packed, table, n, k0, k1, **modes, num_warps=warps)
    return packed


def ternary_decode(
    packed: Tensor,
    scale: Tensor,
    count: int,
    lengths: tuple[int, ...] | None,
    config: tuple[int, int] = DECODE,
) -> Tensor:
    """See `plain.ternary_decode`; with lengths, one scale per tensor."""
    size, warps = config
    out = torch.empty(count, dtype=torch.float32, device=packed.device)
    if count == 0:
        return out
    table = None if lengths is None else chunk_table(lengths, size * 4, 2, packed.device)[0]
    programs = triton.cdiv(count, size * 4) if table is None else table.shape[0]
    modes = {"TABLE": table is not None, "BYTES": size}
    _ternary_decode[(programs,)](packed, scale, table, out, count, **modes, num_warps=warps)
    return out
