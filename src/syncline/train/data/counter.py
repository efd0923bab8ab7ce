"""Counter-based random numbers: each is a function of (seed, stream, index, draw) only.

A sample is therefore the same on every rank, in every batch and order. Integer arithmetic only.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
# The odd constants of the splitmix64 generator, as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def bits(seed: int, stream: int, indices: Tensor, draws: int) -> Tensor:
    """Random 63-bit integers, one row of `draws` for each index."""
    start = (seed * 0xD1342543DE82EF95 + stream * 0xA0761D6478BD642F + _GOLDEN) & _MASK
    row = _mix(indices.to(torch.int64).unsqueeze(1) + _signed(start))
    column = torch.arange(1, draws + 1, dtype=torch.int64, device="cpu") * _signed(_GOLDEN)
    return _mix(row + column) & ((1 << 63) - 1)


def uniform(seed: int, stream: int, indices: Tensor, draws: int) -> Tensor:
    """Random numbers in [0, 1), 24 bits each, so that they are exact in float32."""
    return (bits(seed, stream, indices, draws) >> 39).to(torch.float32) / (1 << 24)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(value: Tensor, by: int) -> Tensor:
    # torch shifts signed integers arithmetically: clear the copies of the sign bit.
    return (value >> by) & ((1 << (64 - by)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _MIX1
    value = (value ^ _shift(value, 27)) * _MIX2
    return value ^ _shift(value, 31)
