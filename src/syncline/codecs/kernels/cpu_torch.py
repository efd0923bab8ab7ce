"""The dense operators on the CPU: vectorised torch over pieces that stay in the cache.

A pass over a large tensor costs as much as a copy of it, so each piece is read from memory once and all further
steps run in the second-level cache. Comparisons that write bools are slow in torch; signs are taken from the
floats' bits instead, and eight bytes of 0 or 1 are packed by one multiplication of an int64.
"""

import torch
from torch import Tensor

from syncline.codecs.kernels import plain
from syncline.codecs.kernels.rng import uniform

# Values per chunk: 256 KiB of float32. Two buffers and the input's lines fit a megabyte of cache.
CHUNK = 1 << 16
_ONES = 0x0101010101010101
# Byte i times 2**(56 - 7 i) lands on bit 56 + i; no two products meet below, so nothing carries.
_GATHER = 0x0102040810204080


def sign_encode(x: Tensor, l1: bool) -> tuple[Tensor, Tensor]:
    """Packed bits and (mean of positives, mean of negatives), or the mean magnitude with `l1`."""
    n = x.numel()
    packed = torch.empty((n + 7) // 8, dtype=torch.uint8)
    full = n - n % 1024  # whole rows of 128 words, so that bytes of a row's sum cannot overflow
    size = min(CHUNK, full)
    values, part = torch.empty(size), torch.empty(size)
    shifted, signs = torch.empty(size, dtype=torch.int32), torch.empty(size, dtype=torch.int8)
    pos, neg, below = [], [], []
    for start in range(0, full, CHUNK):
        m = min(CHUNK, full - start)
        v, p, s, b = values[:m], part[:m], shifted[:m], signs[:m]
        torch.add(x[start : start + m], 0.0, out=v)  # and -0 becomes 0, which is not negative
        pos.append(torch.clamp(v, min=0.0, out=p).sum())
        neg.append(torch.clamp(v, max=0.0, out=p).sum())
        torch.bitwise_right_shift(v.view(torch.int32), 31, out=s)
        words = b.copy_(s).view(torch.int64).bitwise_and_(_ONES)
        if not l1:
            below.append(words.view(-1, 128).sum(1).view(torch.uint8).sum())
        words.mul_(_GATHER).bitwise_right_shift_(56)
        packed[start // 8 : (start + m) // 8].copy_(words).bitwise_not_()
    tail = x[full:].float()
    positive = tail >= 0
    packed[full // 8 :] = plain.pack_bits(positive.to(torch.uint8), 1)
    pos.append(tail.clamp(min=0.0).sum())
    neg.append(tail.clamp(max=0.0).sum())
    pos_sum, neg_sum = torch.stack(pos).double().sum(), torch.stack(neg).double().sum()
    if l1:
        return packed, ((pos_sum - neg_sum) / max(1, n)).float().view(1)
    below.append((~positive).sum())
    fewer = torch.stack(below).sum()
    means = torch.stack([pos_sum / (n - fewer).clamp(min=1), neg_sum / fewer.clamp(min=1)])
    return packed, means.float()


def quantize_blocks(x: Tensor, bits: int, block: int, seed: int | None, l2: bool) -> tuple[Tensor, Tensor]:
    """See `plain.quantize_blocks`; a block that divides `CHUNK`, bits 4 or 8."""
    n, top = x.numel(), (1 << (bits - 1)) - 1
    full = n - n % block
    packed = torch.empty((n * bits + 7) // 8, dtype=torch.uint8)
    scales = torch.empty(-(-n // block))
    size = min(CHUNK, full)
    values, codes = torch.empty(size), torch.empty(size, dtype=torch.int8)
    for start in range(0, full, CHUNK):
        m = min(CHUNK, full - start)
        v, c = values[:m].view(-1, block), codes[:m]
        rows = x[start : start + m].view(-1, block)
        if l2:
            step, factor = plain.block_scales(rows.float(), top, l2)
        else:
            largest = torch.abs(rows, out=v if x.dtype == torch.float32 else None).amax(dim=1).float()
            step, factor = plain.step_and_factor(largest, top)
        torch.mul(rows, factor[:, None], out=v)
        if seed is None:
            v.round_()
        else:
            v.add_(uniform(m, seed=seed, offset=start).view(-1, block)).floor_().clamp_(-top, top)
        if not bool(factor.isfinite().all() & (factor > 0).all()):
            v.nan_to_num_(0.0, 0.0, 0.0)  # 0 * inf, in a block that is not finite
        c.copy_(v.view(-1))
        scales[start // block : (start + m) // block] = step
        _store(packed, c, start, bits)
    if full < n:
        last, scale = plain.quantize_blocks(x[full:], bits, block, seed, l2, offset=full)
        packed[full * bits // 8 :] = last
        scales[full // block :] = scale
    return packed, scales


def _store(packed: Tensor, codes: Tensor, start: int, bits: int) -> None:
    out = packed[start * bits // 8 : (start + codes.numel()) * bits // 8]
    if bits == 8:
        out.copy_(codes.view(torch.uint8))
    else:  # two bytes as an int16: the low nibble of each
        pairs = codes.view(torch.int16)
        out.copy_((pairs & 15).bitwise_or_((pairs >> 4).bitwise_and_(0xF0)))


# For 1, 2, 4 bits: the word that holds one byte's values, and the factor and shift that gather them.
_WORDS = {1: (torch.int64, _GATHER, 56), 2: (torch.int32, 0x01041040, 24), 4: (torch.int16, 0x0110, 8)}


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """See `plain.pack_bits`; bits 1, 2 or 4. Values go through a multiplication, a byte's worth at a time."""
    word, factor, shift = _WORDS[bits]
    per = 8 // bits
    clean = torch.nn.functional.pad(values & ((1 << bits) - 1), (0, -values.numel() % per))
    return (clean.view(word) * factor).bitwise_right_shift_(shift).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """See `plain.unpack_bits`; bits 1, 2 or 4, by a table of what each byte holds."""
    word, _, _ = _WORDS[bits]
    table = plain.unpack_bits(torch.arange(256, dtype=torch.uint8), bits, 256 * (8 // bits)).view(word)
    return table.index_select(0, packed.to(torch.int32)).view(torch.uint8)[:count]
