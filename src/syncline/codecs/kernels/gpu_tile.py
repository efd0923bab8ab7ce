"""Triton: loading and storing a tile that may be the ragged last one."""

import triton
import triton.language as tl


@triton.jit
def load_tile(pointer, local, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Float32 values pointer[local], 0 from `count` on.

    A full tile is loaded without a mask: with one, the compiler cannot prove that 16-byte loads are safe.
    """
    if count == TILE:
        x = tl.load(pointer + local)
    else:
        x = tl.load(pointer + local, mask=local < count, other=0.0)
    return x.to(tl.float32)


@triton.jit
def store_tile(pointer, local, value, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """pointer[local] = value up to `count`; without a mask where the tile is full."""
    if count == TILE:
        tl.store(pointer + local, value)
    else:
        tl.store(pointer + local, value, mask=local < count)
