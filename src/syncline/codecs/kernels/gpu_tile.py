"""Triton: loading and storing a tile that may be the ragged last one."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"
# ruff: noqa: SIM108

import triton
import triton.language as tl


@triton.jit
def load_tile(pointer, local, count, TILE: tl.constexpr):
    """pointer[local], 0 from `count` on.

    A full tile is loaded without a mask: with one, the compiler cannot prove that 16-byte loads are safe.
    """
    if count == TILE:
        x = tl.load(pointer + local)
    else:
        x = tl.load(pointer + local, mask=local < count, other=0)
    return x


@triton.jit
def load_sum(x_ptr, residual_ptr, start, local, count, ADD: tl.constexpr, TILE: tl.constexpr):
    """The tile of x at `start` as float32, with the residual's added where there is one."""
    x = load_tile(x_ptr + start, local, count, TILE).to(tl.float32)
    if ADD:
        x += load_tile(residual_ptr + start, local, count, TILE)
    return x


@triton.jit
def store_sum(pointer, local, value, count, divisor, ONTO: tl.constexpr, TILE: tl.constexpr):
    """pointer[local] = value; with ONTO, added to what is there and divided by `divisor`."""
    if ONTO:
        value = tl.div_rn(load_tile(pointer, local, count, TILE) + value, divisor)
    store_tile(pointer, local, value, count, TILE)


@triton.jit
def store_tile(pointer, local, value, count, TILE: tl.constexpr):
    """pointer[local] = value up to `count`; without a mask where the tile is full."""
    if count == TILE:
        tl.store(pointer + local, value)
    else:
        tl.store(pointer + local, value, mask=local < count)
