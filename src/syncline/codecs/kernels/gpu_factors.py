"""Triton: orthonormal columns and columns of norm 1, for the factors of low-rank codecs, with few launches.

The algorithm is that of `linalg`: shifted Cholesky QR in float64, twice. Small factors take one launch for everything,
a program for each matrix. For others torch multiplies, and one launch factors and inverts the small Gram matrices.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels.gpu_launch import launch
from syncline.codecs.kernels.linalg import FLOOR, SHIFT

_SHIFT = tl.constexpr(SHIFT)
_FLOOR = tl.constexpr(FLOOR)
# Columns and values of a matrix that one program orthonormalises alone, and columns that it can factor.
NARROW, FEW, WIDE = 8, 1 << 15, 128
# Values of an outer product that a program holds.
_HELD = 8192
# Values of a factor whose columns one program scales.
_SINGLE = 1 << 17


@triton.jit
def _inverse_factor(gram, columns, LAST: tl.constexpr, SIZE: tl.constexpr):
    """The inverse of the lower Cholesky factor of gram + shift; in the last pass without rows of missing columns."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    line = tl.arange(0, SIZE)
    trace = tl.sum(tl.sum(tl.where(row == column, gram, 0.0), axis=1), axis=0)
    shift = trace * _SHIFT + _FLOOR
    left = gram + tl.where(row == column, shift, 0.0)
    inverse = tl.where(row == column, 1.0, 0.0).to(tl.float64)
    j = 0
    while j < columns:  # not range: the interpreter cannot run one with such bounds
        pivots = tl.sum(tl.where(column == j, left, 0.0), axis=1)
        pivot = tl.sum(tl.where(line == j, pivots, 0.0), axis=0)
        # A pivot lost to rounding is a missing column; nan stays nan.
        scale = tl.where(pivot > 0, 1.0 / tl.sqrt(tl.where(pivot > 0, pivot, 1.0)), tl.where(pivot <= 0, 0.0, pivot))
        factor = tl.where(line >= j, pivots * scale, 0.0)
        solved = tl.sum(tl.where(row == j, inverse, 0.0), axis=0) * scale
        below = tl.where(line > j, factor, 0.0)
        left -= factor[:, None] * factor[None, :]
        inverse = tl.where(row == j, solved[None, :], inverse - below[:, None] * solved[None, :])
        j += 1
    if LAST:
        # The squared norm of a column of the result; multiplying instead of selecting lets nan through.
        norms = 1.0 - shift * tl.sum(inverse * inverse, axis=1)
        inverse = inverse * tl.where(norms < 0.25, 0.0, 1.0)[:, None]
    return inverse


@triton.jit
def _rows(m_ptr, start, rows, columns, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    return tl.load(m_ptr + row * columns + column, mask=(row < rows) & (column < columns), other=0.0).to(tl.float64)


@triton.jit
def _times(x, inverse):
    """x @ inverse.T for a few columns."""
    return tl.sum(x[:, None, :] * inverse[None, :, :], axis=2)


@triton.jit(do_not_specialize=["rows", "columns"])
def _orthonormal(m_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, SIZE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * rows * columns
    gram = tl.zeros([SIZE, SIZE], dtype=tl.float64)
    start = 0
    while start < rows:
        x = _rows(m_ptr + base, start, rows, columns, ROWS, SIZE)
        gram += tl.sum(x[:, :, None] * x[:, None, :], axis=0)
        start += ROWS
    first = _inverse_factor(gram, columns, False, SIZE)
    gram = tl.zeros([SIZE, SIZE], dtype=tl.float64)
    start = 0
    while start < rows:
        q = _times(_rows(m_ptr + base, start, rows, columns, ROWS, SIZE), first)
        gram += tl.sum(q[:, :, None] * q[:, None, :], axis=0)
        start += ROWS
    second = _inverse_factor(gram, columns, True, SIZE)
    start = 0
    while start < rows:
        q = _times(_times(_rows(m_ptr + base, start, rows, columns, ROWS, SIZE), first), second)
        row = start + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, SIZE)[None, :]
        inside = (row < rows) & (column < columns)
        tl.store(out_ptr + base + row * columns + column, q.to(out_ptr.dtype.element_ty), mask=inside)
        start += ROWS


@triton.jit(do_not_specialize=["columns"])
def _invert(gram_ptr, out_ptr, columns, LAST: tl.constexpr, SIZE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * columns * columns
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    inside = (row < columns) & (column < columns)
    gram = tl.load(gram_ptr + base + row * columns + column, mask=inside, other=0.0)
    inverse = _inverse_factor(gram, columns, LAST, SIZE)
    tl.store(out_ptr + base + row * columns + column, inverse, mask=inside)


@triton.jit(do_not_specialize=["rows", "columns"])
def _unit_columns(factor_ptr, fresh_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, SIZE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * rows * columns
    column = tl.arange(0, SIZE)[None, :]
    square = tl.zeros([SIZE], dtype=tl.float64)
    start = 0
    while start < rows:
        x = _rows(factor_ptr + base, start, rows, columns, ROWS, SIZE)
        square += tl.sum(x * x, axis=0)
        start += ROWS
    norm = tl.sqrt(square).to(tl.float32)[None, :]
    start = 0
    while start < rows:
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        place = base + row * columns + column
        x = tl.load(factor_ptr + place, mask=inside, other=0.0)
        fresh = tl.load(fresh_ptr + place, mask=inside, other=0.0)
        tl.store(out_ptr + place, tl.where(norm == 0, fresh, x / tl.where(norm == 0, 1.0, norm)), mask=inside)
        start += ROWS


def orthonormal(m: Tensor) -> Tensor:
    """See `linalg.orthonormal`; (..., rows, columns) with at most `WIDE` columns."""
    *_, rows, columns = m.shape
    m = m.contiguous()
    batch = m.view(-1, rows, columns)
    size = max(2, triton.next_power_of_2(columns))
    if size <= NARROW and rows * columns <= FEW:
        out = torch.empty_like(m)
        tile = min(_HELD // (size * size), triton.next_power_of_2(rows))
        launch(_orthonormal, batch.shape[0], m, out, rows, columns, ROWS=tile, SIZE=size, warps=4)
        return out
    q = batch.double()
    for last in (False, True):
        gram = q.mT @ q
        inverse = torch.empty_like(gram)
        warps = max(1, size * size // 1024)
        launch(_invert, q.shape[0], gram, inverse, columns, LAST=last, SIZE=size, warps=warps)
        q = q @ inverse.mT
    return q.to(m.dtype).view(m.shape)


def unit_columns(factor: Tensor, fresh: Tensor) -> Tensor:
    """See `linalg.unit_columns`; (batch, rows, columns) in float32."""
    batch, rows, columns = factor.shape
    if rows * columns > _SINGLE:  # one program would take too long
        norm = torch.linalg.vector_norm(factor, dim=-2, keepdim=True)
        return torch.where(norm == 0, fresh, factor / norm)
    factor, fresh = factor.contiguous(), fresh.contiguous()
    out = torch.empty_like(factor)
    size = triton.next_power_of_2(columns)
    tile = min(max(1, 2048 // size), triton.next_power_of_2(rows))
    launch(_unit_columns, batch, factor, fresh, out, rows, columns, ROWS=tile, SIZE=size, warps=4)
    return out
