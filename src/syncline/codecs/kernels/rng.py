"""Random numbers by counting: number i of a seed is a hash of (seed, i), the same on every device and rank.

The hash is a keyed variant of "triple32" (C. Wellons), 32-bit integer arithmetic alone, so that torch on the
CPU, torch on CUDA and the Triton kernels give the same bits.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
M1, M2, M3, GOLDEN = 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB, 0x9E3779B9


def signed32(value: int) -> int:
    """The int32 that has the low 32 bits of `value`."""
    value &= _MASK
    return value - (1 << 32) if value >= 1 << 31 else value


def keys(seed: int) -> tuple[int, int]:
    """Two signed 32-bit keys of a 64-bit seed (splitmix64, so that neighbouring seeds share nothing)."""
    z = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    z ^= z >> 31
    return signed32(z), signed32(z >> 32)


def random_bits(n: int, *, seed: int, offset: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Numbers `offset .. offset + n` of the seed, as int32 with all 32 bits random."""
    pieces = []
    start, stop = offset, offset + n
    while start < stop:  # a piece per 2**32 numbers: the high half of the counter goes into the key
        high = start >> 32
        end = min(stop, (high + 1) << 32)
        pieces.append(_bits(start & _MASK, end - start, high, seed, device))
        start = end
    if not pieces:
        return torch.empty(0, dtype=torch.int32, device=device)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _bits(low: int, n: int, high: int, seed: int, device: torch.device | str) -> Tensor:
    k0, k1 = keys(seed)
    k1 = signed32(k1 + high * GOLDEN)
    if low + n <= 1 << 31:
        x = torch.arange(low, low + n, dtype=torch.int32, device=device)
    else:  # past int32's range; the wrapped int32 is what is hashed
        x = torch.arange(low, low + n, dtype=torch.int64, device=device).to(torch.int32)
    x.add_(k0)
    _fold(x, 17).mul_(signed32(M1))
    _fold(x, 11).mul_(signed32(M2)).add_(k1)
    _fold(x, 15).mul_(signed32(M3))
    return _fold(x, 14)


def _fold(x: Tensor, shift: int) -> Tensor:
    """x ^= x >>> shift, unsigned: torch shifts int32 with the sign, so the copies of it are masked off."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def uniform(n: int, *, seed: int, offset: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Float32 numbers in [0, 1), multiples of 2**-24."""
    bits = random_bits(n, seed=seed, offset=offset, device=device)
    return (bits >> 8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)
