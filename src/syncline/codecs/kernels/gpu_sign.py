"""Triton: signs with their means (onebit, efsignsgd), with or without a residual; many tensors in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"
# ruff: noqa: SIM108

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels.adjacent import adjacent
from syncline.codecs.kernels.gpu_launch import launch
from syncline.codecs.kernels.gpu_tile import load_sum, load_tile, store_sum, store_tile
from syncline.codecs.kernels.segments import chunk_table, packed_bytes

# Bytes of output per program, warps. The partial sums follow the tile, so the choice is fixed, never tuned at run
# time: ranks that tuned differently would disagree in the last bit.
ENCODE = (512, 4)
DECODE = (512, 4)


@triton.jit(do_not_specialize=["n", "programs"])
def _sign_encode(
    x_ptr,
    residual_ptr,
    packed_ptr,
    partial_ptr,
    sum_ptr,
    table_ptr,
    n,
    programs,
    TABLE: tl.constexpr,
    ADD: tl.constexpr,
    BYTES: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    if TABLE:
        start = tl.load(table_ptr + pid * 5)
        count = tl.load(table_ptr + pid * 5 + 1).to(tl.int32)
        byte = tl.load(table_ptr + pid * 5 + 2)
    else:
        start = pid * (BYTES * 8)
        count = tl.minimum(n - start, BYTES * 8).to(tl.int32)
        byte = pid * BYTES
    row = tl.arange(0, BYTES)
    place = tl.arange(0, 8)
    local = row[:, None] * 8 + place[None, :]
    x = load_sum(x_ptr, residual_ptr, start, local, count, ADD, BYTES * 8)
    if ADD:
        store_tile(sum_ptr + start, local, x, count, BYTES * 8)
    positive = (x >= 0) & (local < count)
    bits = tl.sum(positive.to(tl.int32) << place[None, :], axis=1)
    tl.store(packed_ptr + byte + row, bits.to(tl.uint8), mask=row * 8 < count)
    tl.store(partial_ptr + pid, tl.sum(tl.sum(tl.where(positive, x, 0.0), axis=1), axis=0))
    tl.store(partial_ptr + programs + pid, tl.sum(tl.sum(tl.where(positive, 0.0, x), axis=1), axis=0))
    total = tl.sum(tl.sum(positive.to(tl.int32), axis=1), axis=0)
    tl.store(partial_ptr + 2 * programs + pid, total.to(tl.float32))


@triton.jit(do_not_specialize=["n", "programs", "pieces"])
def _sign_means(partial_ptr, means_ptr, pieces_ptr, n, programs, pieces, TABLE: tl.constexpr, L1: tl.constexpr):
    piece = tl.program_id(0)
    if TABLE:
        first = tl.load(pieces_ptr + piece * 3)
        last = tl.load(pieces_ptr + piece * 3 + 1)
        length = tl.load(pieces_ptr + piece * 3 + 2).to(tl.float64)
    else:
        first = piece
        last = piece + programs
        length = n.to(tl.float64)
    local = tl.arange(0, 1024)
    pos = tl.zeros([1024], dtype=tl.float64)
    neg = tl.zeros([1024], dtype=tl.float64)
    count = tl.zeros([1024], dtype=tl.float64)
    base = first.to(tl.int64)
    while base < last:  # not range: the interpreter cannot run one with bounds from memory
        mask = base + local < last
        pos += tl.load(partial_ptr + base + local, mask=mask, other=0.0).to(tl.float64)
        neg += tl.load(partial_ptr + programs + base + local, mask=mask, other=0.0).to(tl.float64)
        count += tl.load(partial_ptr + 2 * programs + base + local, mask=mask, other=0.0).to(tl.float64)
        base += 1024
    pos_sum = tl.sum(pos, axis=0)
    neg_sum = tl.sum(neg, axis=0)
    pos_count = tl.sum(count, axis=0)
    if L1:
        tl.store(means_ptr + piece, ((pos_sum - neg_sum) / tl.maximum(length, 1.0)).to(tl.float32))
    else:
        tl.store(means_ptr + piece, (pos_sum / tl.maximum(pos_count, 1.0)).to(tl.float32))
        neg_mean = neg_sum / tl.maximum(length - pos_count, 1.0)
        tl.store(means_ptr + pieces + piece, neg_mean.to(tl.float32))


@triton.jit(do_not_specialize=["n", "pieces"])
def _sign_rest(
    x_ptr,
    means_ptr,
    rest_ptr,
    table_ptr,
    n,
    pieces,
    TABLE: tl.constexpr,
    L1: tl.constexpr,
    BYTES: tl.constexpr,
):
    """What the payload does not say; x and the rest may be the same memory."""
    pid = tl.program_id(0).to(tl.int64)
    if TABLE:
        start = tl.load(table_ptr + pid * 5)
        count = tl.load(table_ptr + pid * 5 + 1).to(tl.int32)
        piece = tl.load(table_ptr + pid * 5 + 3)
    else:
        start = pid * (BYTES * 8)
        count = tl.minimum(n - start, BYTES * 8).to(tl.int32)
        piece = pid * 0
    pos = tl.load(means_ptr + piece)
    if L1:
        neg = -pos
    else:
        neg = tl.load(means_ptr + pieces + piece)
    local = tl.arange(0, BYTES * 8)
    x = load_tile(x_ptr + start, local, count, BYTES * 8).to(tl.float32)
    store_tile(rest_ptr + start, local, x - tl.where(x >= 0, pos, neg), count, BYTES * 8)


@triton.jit(do_not_specialize=["n", "divisor"])
def _sign_decode(
    packed_ptr,
    pos_ptr,
    neg_ptr,
    table_ptr,
    out_ptr,
    n,
    divisor,
    TABLE: tl.constexpr,
    ONTO: tl.constexpr,
    BYTES: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    if TABLE:
        start = tl.load(table_ptr + pid * 5)
        count = tl.load(table_ptr + pid * 5 + 1).to(tl.int32)
        byte = tl.load(table_ptr + pid * 5 + 2)
        piece = tl.load(table_ptr + pid * 5 + 3)
        pos = tl.load(pos_ptr + piece)
        neg = tl.load(neg_ptr + piece)
    else:
        start = pid * (BYTES * 8)
        count = tl.minimum(n - start, BYTES * 8).to(tl.int32)
        byte = pid * BYTES
        pos = tl.load(pos_ptr)
        neg = tl.load(neg_ptr)
    row = tl.arange(0, BYTES)
    place = tl.arange(0, 8)
    bits = tl.load(packed_ptr + byte + row, mask=row * 8 < count, other=0).to(tl.int32)
    local = row[:, None] * 8 + place[None, :]
    value = tl.where(((bits[:, None] >> place[None, :]) & 1) != 0, pos, neg)
    store_sum(out_ptr + start, local, value, count, divisor, ONTO, BYTES * 8)


def sign_encode(
    x: Tensor, lengths: tuple[int, ...] | None, l1: bool, config: tuple[int, int] = ENCODE
) -> tuple[Tensor, Tensor]:
    """Packed bits and means: (2, pieces), positive side first; (1, pieces) mean magnitudes with `l1`."""
    return _encode(x, None, None, lengths, l1, config)


def sign_residual(
    x: Tensor,
    residual: Tensor | None,
    lengths: tuple[int, ...] | None,
    l1: bool,
    config: tuple[int, int] = ENCODE,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `pieces.sign_residual`; two passes, because the means depend on all values."""
    n, (size, warps) = x.numel(), config
    rest = torch.empty(n, dtype=torch.float32, device=x.device)
    packed, means = _encode(x, residual, rest, lengths, l1, config)
    if n:
        table = None if lengths is None else chunk_table(lengths, size * 8, 1, x.device)[0]
        programs = triton.cdiv(n, size * 8) if table is None else table.shape[0]
        source = x if residual is None else rest
        modes = {"TABLE": table is not None, "L1": l1, "BYTES": size}
        launch(_sign_rest, programs, source, means, rest, table, n, means.shape[1], **modes, warps=warps)
    return packed, means, rest


def _encode(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    lengths: tuple[int, ...] | None,
    l1: bool,
    config: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Bits and means of x, or with a residual of their sum, which goes to `total`."""
    n, (size, warps) = x.numel(), config
    pieces = 1 if lengths is None else len(lengths)
    size_bytes = (n + 7) // 8 if lengths is None else packed_bytes(lengths, 1)
    parts = ((size_bytes,), torch.uint8), ((1 if l1 else 2, pieces), torch.float32)
    packed, means = adjacent(x.device, *parts)
    if n == 0:
        return packed, means.zero_()
    if lengths is None:
        table = ranges = None
        programs = triton.cdiv(n, size * 8)
    else:
        table, ranges = chunk_table(lengths, size * 8, 1, x.device)
        programs = table.shape[0]
    partial = torch.empty(3 * programs, dtype=torch.float32, device=x.device)
    many = table is not None
    tensors, modes = (x, residual, packed, partial, total, table), {"TABLE": many, "ADD": residual is not None}
    launch(_sign_encode, programs, *tensors, n, programs, **modes, BYTES=size, warps=warps)
    launch(_sign_means, pieces, partial, means, ranges, n, programs, pieces, TABLE=many, L1=l1, warps=4)
    return packed, means


def sign_decode(
    packed: Tensor,
    pos: Tensor,
    neg: Tensor,
    count: int,
    lengths: tuple[int, ...] | None,
    config: tuple[int, int] = DECODE,
) -> Tensor:
    """See `plain.sign_decode`; with lengths, one mean per tensor."""
    out = torch.empty(count, dtype=torch.float32, device=packed.device)
    _decode(packed, pos, neg, lengths, out, None, config)
    return out


def sign_onto(
    packed: Tensor, pos: Tensor, neg: Tensor, lengths: tuple[int, ...] | None, total: Tensor, divisor: float
) -> None:
    """See `pieces.sign_onto`, in one pass."""
    _decode(packed, pos, neg, lengths, total, divisor, DECODE)


def _decode(
    packed: Tensor,
    pos: Tensor,
    neg: Tensor,
    lengths: tuple[int, ...] | None,
    out: Tensor,
    divisor: float | None,
    config: tuple[int, int],
) -> None:
    count, (size, warps) = out.numel(), config
    if count == 0:
        return
    table = None if lengths is None else chunk_table(lengths, size * 8, 1, packed.device)[0]
    programs = triton.cdiv(count, size * 8) if table is None else table.shape[0]
    modes = {"TABLE": table is not None, "ONTO": divisor is not None, "BYTES": size}
    launch(_sign_decode, programs, packed, pos, neg, table, out, count, divisor or 1.0, **modes, warps=warps)
