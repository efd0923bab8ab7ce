"""The reference of every dense operator in plain torch, on any device: short, obvious, many passes over memory.

The fused kernels are tested against these, and stand in front of them only where they are faster.
"""

import torch
from torch import Tensor

from syncline.codecs.kernels.rng import random_bits, uniform

# Below this a block's largest value is as good as zero: its reciprocal would overflow float32.
TINY = 1e-35
# The largest norm that is said; above it float32 ends.
HUGE = 3e38
# Exponents that the 7 bits of a natural code can say: code 1 is 2**NATURAL_LOW, code 126 is 2**(LOW + 125).
NATURAL_LOW = -75


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Eight values become `bits` bytes, the first value in the lowest bits."""
    n = values.numel()
    padded = torch.nn.functional.pad(values, (0, -n % 8)).view(-1, 8).to(torch.int64)
    word = torch.zeros(padded.shape[0], dtype=torch.int64, device=values.device)
    for i in range(8):
        word |= (padded[:, i] & ((1 << bits) - 1)) << (bits * i)
    out = torch.stack([(word >> (8 * j)) & 255 for j in range(bits)], dim=1)
    return out.to(torch.uint8).view(-1)[: (n * bits + 7) // 8]


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` values that `pack_bits` packed."""
    groups = (count + 7) // 8
    padded = torch.nn.functional.pad(packed, (0, groups * bits - packed.numel())).view(-1, bits).to(torch.int64)
    word = torch.zeros(groups, dtype=torch.int64, device=packed.device)
    for j in range(bits):
        word |= padded[:, j] << (8 * j)
    out = torch.stack([(word >> (bits * i)) & ((1 << bits) - 1) for i in range(8)], dim=1)
    return out.to(torch.uint8).view(-1)[:count]


def block_scales(blocks: Tensor, top: int, l2: bool) -> tuple[Tensor, Tensor]:
    """Per row: the size of one step, and the factor that takes a value to steps (0 if the row is not finite)."""
    size = blocks.abs().amax(dim=1)
    if l2:  # scaled by the largest, so that squares neither overflow nor vanish
        unit = blocks * torch.where((size > TINY) & (size < torch.inf), 1 / size, 0.0)[:, None]
        norm = size * torch.linalg.vector_norm(unit, dim=1)
        size = torch.where(size < torch.inf, norm.clamp(max=HUGE), size)
    return step_and_factor(size, top)


def step_and_factor(size: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The step and its inverse for blocks whose largest code, `top`, stands for `size`."""
    usable = (size > TINY) & (size < torch.inf)
    # A number over a tensor would be a product with the reciprocal, which rounds twice.
    return size / top, torch.where(usable, torch.full_like(size, top) / size, 0.0)


def quantize_blocks(
    x: Tensor, bits: int, block: int, seed: int | None, l2: bool, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Signed steps of each block's size / (2**(bits-1) - 1), in two's complement; noise counted from `offset`."""
    n, top = x.numel(), (1 << (bits - 1)) - 1
    blocks = torch.nn.functional.pad(x.float(), (0, -n % block)).view(-1, block)
    step, factor = block_scales(blocks, top, l2)
    steps = blocks * factor[:, None]
    if seed is None:
        steps = steps.round()
    else:
        noise = uniform(blocks.numel(), seed=seed, offset=offset, device=x.device).view(-1, block)
        steps = (steps + noise).floor().clamp(-top, top)
    # A block with nan or inf has a factor of 0 and a step that is not finite: it decodes to nan as a whole.
    codes = steps.nan_to_num(0.0, 0.0, 0.0).to(torch.int8).view(torch.uint8).view(-1)[:n]
    return (codes.clone() if bits == 8 else pack_bits(codes, bits)), step


def dequantize_blocks(packed: Tensor, scales: Tensor, bits: int, block: int, count: int) -> Tensor:
    """Steps times step size."""
    half = 1 << (bits - 1)
    codes = unpack_bits(packed, bits, count).to(torch.int16)
    values = ((codes ^ half) - half).float()
    padded = torch.nn.functional.pad(values, (0, -count % block)).view(-1, block)
    return (padded * scales[:, None]).view(-1)[:count]


def sign_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bits of x >= 0, the mean where it holds and the mean where it does not (0 for an empty side)."""
    x = x.float()
    positive = x >= 0
    count = positive.sum()
    mean_pos = torch.where(positive, x, 0.0).sum() / count.clamp(min=1)
    mean_neg = torch.where(positive, 0.0, x).sum() / (x.numel() - count).clamp(min=1)
    return pack_bits(positive.to(torch.uint8), 1), mean_pos, mean_neg


def sign_encode_l1(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of x >= 0, and the mean of |x|."""
    x = x.float()
    return pack_bits((x >= 0).to(torch.uint8), 1), x.abs().sum() / max(1, x.numel())


def sign_decode(packed: Tensor, pos: Tensor, neg: Tensor, count: int) -> Tensor:
    """`pos` where the bit is set, `neg` elsewhere."""
    return torch.where(unpack_bits(packed, 1, count).bool(), pos, neg)


def ternary_encode(x: Tensor, threshold: Tensor) -> Tensor:
    """Two-bit two's complement: 1 above the threshold, -1 below its negative, -2 for nan and inf, else 0."""
    x = x.float()
    codes = torch.where(x > threshold, 1, torch.where(x < -threshold, 3, 0))
    return pack_bits(torch.where(x.isfinite(), codes, 2).to(torch.uint8), 2)


def terngrad_encode(x: Tensor, scale: Tensor, seed: int) -> Tensor:
    """The codes of `ternary_encode`: the sign with probability |x| / scale."""
    return ternary_encode(x, uniform(x.numel(), seed=seed, device=x.device) * scale)


def ternary_decode(packed: Tensor, scale: Tensor, count: int) -> Tensor:
    """0, scale, -scale or nan."""
    table = torch.tensor([0.0, 1.0, float("nan"), -1.0], device=packed.device)
    return table[unpack_bits(packed, 2, count).int()] * scale


def natural_encode(x: Tensor, seed: int) -> Tensor:
    """Sign and exponent, the exponent rounded up with the probability that the mantissa says."""
    whole = x.float().contiguous().view(torch.int32)
    noise = random_bits(x.numel(), seed=seed, device=x.device) & 0x7FFFFF
    magnitude = whole & 0x7FFFFFFF
    exponent = (magnitude + noise) >> 23
    code = (exponent - 127 - NATURAL_LOW + 1).clamp(0, 126)
    code = torch.where(magnitude >= 0x7F800000, 127, code)
    return (code | ((whole >> 24) & 128)).to(torch.uint8)


def natural_decode(codes: Tensor) -> Tensor:
    """Powers of two; code 0 is zero, code 127 is nan."""
    code = codes.to(torch.int32)
    low = code & 127
    value = torch.where(low > 0, (low - 1 + NATURAL_LOW + 127) << 23, 0)
    value = torch.where(low == 127, 0x7FC00000, value) | ((code & 128) << 24)
    return value.view(torch.float32)


def moments(x: Tensor) -> Tensor:
    """Mean, standard deviation (of all values, not of a sample) and largest magnitude; zeros for no values."""
    x = x.float()
    if not x.numel():
        return x.new_zeros(3)
    deviation, mean = torch.std_mean(x, unbiased=False)
    return torch.stack([mean, deviation, x.abs().amax()])


def keep_if(good: Tensor, new: Tensor, old: Tensor | None) -> None:
    """Overwrite `new` with `old`, or with zeros, unless `good`."""
    new.copy_(torch.where(good, new, 0 if old is None else old))


def saturate(x: Tensor, limit: float, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """x within +-limit, times a factor; inf and nan pass as they are."""
    x = x if x.dtype == torch.float64 else x.float()
    return (torch.where(x.isinf(), x, x.clamp(-limit, limit)) * factor).to(dtype)
