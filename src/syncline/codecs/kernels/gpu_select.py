"""Triton: large values into a fixed-size list in index order - by threshold, or exactly the k largest.

Magnitudes are compared as the integers of their bits, which order as the floats do, with nan above inf. Two
passes: every program counts what it will write, a running sum gives it its place, and it writes. The k-th key is
found first, without the host: count against thresholds, keep the interval that holds it, repeat. A sample places
the first three so close that what remains fits a small buffer, where 15 at a time find it; if the sample misled,
those rounds run over the whole tensor instead, slower and as exact.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels.sparse import stratified

# Values a program, warps.
CONFIG = (2048, 4)
SAMPLES = 1 << 16
# 16**8 = 2**32 covers every key; one more for the rounding of the intervals.
ROUNDS = 9
PROGRAMS = 132 * 8


@triton.jit
def _keys(x_ptr, start, local, n, TILE: tl.constexpr):
    """Integer magnitudes; -1, below every key, past the end."""
    if start + TILE <= n:
        x = tl.load(x_ptr + start + local).to(tl.float32)
        key = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        x = tl.load(x_ptr + start + local, mask=start + local < n, other=0.0).to(tl.float32)
        key = tl.where(start + local < n, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    return key


@triton.jit(do_not_specialize=["n", "programs"])
def _count(x_ptr, rule_ptr, counts_ptr, n, programs, TIES: tl.constexpr, TILE: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    limit = tl.load(rule_ptr).to(tl.int32)
    key = _keys(x_ptr, pid * TILE, tl.arange(0, TILE), n, TILE)
    tl.store(counts_ptr + pid, tl.sum((key > limit).to(tl.int32), axis=0))
    if TIES:
        tl.store(counts_ptr + programs + pid, tl.sum((key == limit).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["n", "programs", "capacity"])
def _write(
    x_ptr,
    rule_ptr,
    counts_ptr,
    ends_ptr,
    values_ptr,
    indices_ptr,
    n,
    programs,
    capacity,
    TIES: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    start = pid * TILE
    local = tl.arange(0, TILE)
    limit = tl.load(rule_ptr).to(tl.int32)
    key = _keys(x_ptr, start, local, n, TILE)
    keep = key > limit
    # Ends are inclusive running sums: what lies before this tile is its end less its own count.
    before = tl.load(ends_ptr + pid) - tl.load(counts_ptr + pid)
    place = before + tl.cumsum(keep.to(tl.int32), axis=0) - 1
    if TIES:
        ties = tl.load(rule_ptr + 1).to(tl.int32)
        here = tl.load(counts_ptr + programs + pid)
        equal_before = tl.load(ends_ptr + programs + pid) - here
        if here > 0:
            equal = key == limit
            rank = equal_before + tl.cumsum(equal.to(tl.int32), axis=0)
            place += tl.minimum(rank, ties)
            keep = keep | (equal & (rank <= ties))
        else:
            place += tl.minimum(equal_before, ties)
    keep = keep & (place < capacity)
    x = tl.load(x_ptr + start + local, mask=keep)
    tl.store(values_ptr + place, x, mask=keep)
    tl.store(indices_ptr + place, (start + local).to(tl.int32), mask=keep)


@triton.jit(do_not_specialize=["n"])
def _bracket(x_ptr, limits_ptr, bins_ptr, n, TILE: tl.constexpr):
    """The first round: limits 0, 1 and 2 alone, the others repeat the last. Cheap, since it reads everything."""
    local = tl.arange(0, TILE)
    step = tl.num_programs(0).to(tl.int64) * TILE
    start = tl.program_id(0).to(tl.int64) * TILE
    low = tl.load(limits_ptr)
    middle = tl.load(limits_ptr + 1)
    high = tl.load(limits_ptr + 2)
    over_low = tl.zeros([TILE], dtype=tl.int32)
    over_middle = tl.zeros([TILE], dtype=tl.int32)
    over_high = tl.zeros([TILE], dtype=tl.int32)
    while start < n:
        key = _keys(x_ptr, start, local, n, TILE)
        over_low += (key > low).to(tl.int32)
        over_middle += (key > middle).to(tl.int32)
        over_high += (key > high).to(tl.int32)
        start += step
    first = tl.sum(over_low, axis=0)
    second = tl.sum(over_middle, axis=0)
    third = tl.sum(over_high, axis=0)
    tl.atomic_add(bins_ptr + 1, first - second, sem="relaxed")
    tl.atomic_add(bins_ptr + 2, second - third, sem="relaxed")
    tl.atomic_add(bins_ptr + 15, third, sem="relaxed")


@triton.jit(do_not_specialize=["n", "capacity"])
def _bins(x_ptr, buffer_ptr, state_ptr, limits_ptr, bins_ptr, n, capacity, TILE: tl.constexpr):
    """How many keys lie above how many of the 15 limits; over the buffer where the candidates fitted into it."""
    local = tl.arange(0, TILE)
    step = tl.num_programs(0).to(tl.int64) * TILE
    start = tl.program_id(0).to(tl.int64) * TILE
    bins = tl.zeros([16], dtype=tl.int32)
    held = tl.load(state_ptr + 3)
    small = held <= capacity
    total = tl.where(small, held, n)
    total = tl.where(tl.load(state_ptr + 1) - tl.load(state_ptr) <= 1, 0, total)
    while start < total:
        inside = start + local < total
        if small:
            key = tl.load(buffer_ptr + start + local, mask=inside, other=-1)
        else:
            key = _keys(x_ptr, start, local, total, TILE)
        bin = tl.zeros([TILE], dtype=tl.int32)
        for j in tl.static_range(15):
            bin += (key > tl.load(limits_ptr + j)).to(tl.int32)
        bins += tl.histogram(bin, 16)
        start += step
    tl.atomic_add(bins_ptr + tl.arange(0, 16), bins, sem="relaxed")


@triton.jit(do_not_specialize=["k", "capacity"])
def _narrow(state_ptr, limits_ptr, bins_ptr, k, capacity, FIRST: tl.constexpr):
    """The new interval (low, high] that holds the k-th key, and 15 limits inside it; clears the bins."""
    j = tl.arange(0, 16)
    low = tl.load(state_ptr)
    high = tl.load(state_ptr + 1)
    beyond = tl.load(state_ptr + 2)
    bins = tl.load(bins_ptr + j)
    above = tl.sum(tl.where(j[None, :] > j[:, None], bins[None, :], 0), axis=1).to(tl.int64)
    if not FIRST:  # the buffer holds the first interval alone: what lies beyond that is known
        above += tl.where(tl.load(state_ptr + 3) <= capacity, tl.load(state_ptr + 4), 0)
    limits = tl.load(limits_ptr + j, mask=j < 15, other=0).to(tl.int64)
    open_ = (high - low > 1) & (j < 15) & (limits > low) & (limits < high)
    new_low = tl.maximum(low, tl.max(tl.where(open_ & (above >= k), limits, -1), axis=0))
    new_high = tl.minimum(high, tl.min(tl.where(open_ & (above < k), limits, 0x7FFFFFFF), axis=0))
    at_high = tl.max(tl.where(open_ & (limits == new_high), above, -1), axis=0)
    tl.store(state_ptr, new_low)
    tl.store(state_ptr + 1, new_high)
    beyond = tl.where(at_high >= 0, at_high, beyond)
    tl.store(state_ptr + 2, beyond)
    if FIRST:
        tl.store(state_ptr + 4, beyond)
    next_limits = new_low + ((new_high - new_low) * (j + 1)) // 16
    tl.store(limits_ptr + j, next_limits.to(tl.int32), mask=j < 15)
    tl.store(bins_ptr + j, tl.zeros([16], dtype=tl.int32))


@triton.jit(do_not_specialize=["n", "capacity"])
def _candidates(x_ptr, buffer_ptr, state_ptr, n, capacity, TILE: tl.constexpr):
    """Keys of the interval into the buffer, in any order: they are only counted."""
    start = tl.program_id(0).to(tl.int64) * TILE
    key = _keys(x_ptr, start, tl.arange(0, TILE), n, TILE)
    inside = (key > tl.load(state_ptr)) & (key <= tl.load(state_ptr + 1))
    found = tl.sum(inside.to(tl.int32), axis=0)
    if found > 0:
        first = tl.atomic_add(state_ptr + 3, found.to(tl.int64), sem="relaxed")
        place = first + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        tl.store(buffer_ptr + place, key, mask=inside & (place < capacity))


def _select(
    x: Tensor, rule: Tensor, capacity: int, ties: bool, config: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """All keys above rule[0], and with `ties` the first rule[1] that equal it, up to the capacity."""
    n = x.numel()
    values = torch.zeros(capacity, dtype=x.dtype, device=x.device)
    indices = torch.zeros(capacity, dtype=torch.int32, device=x.device)
    tile, warps = config
    programs = triton.cdiv(n, tile)
    counts = torch.empty((2 if ties else 1, programs), dtype=torch.int32, device=x.device)
    options = {"TIES": ties, "TILE": tile, "num_warps": warps}
    _count[(programs,)](x, rule, counts, n, programs, **options)
    ends = counts.cumsum(1, dtype=torch.int32)
    _write[(programs,)](x, rule, counts, ends, values, indices, n, programs, capacity, **options)
    if not ties:
        return values, indices, ends[0, -1].clamp(max=capacity)
    total = ends[0, -1] + torch.minimum(ends[1, -1], rule[1])
    return values, indices, total.clamp(max=capacity).to(torch.int32)


def compact(
    x: Tensor, threshold: Tensor, capacity: int, config: tuple[int, int] = CONFIG
) -> tuple[Tensor, Tensor, Tensor]:
    """See `sparse.compact`."""
    if x.numel() == 0 or capacity == 0:
        zero = torch.zeros((), dtype=torch.int32, device=x.device)
        return x.new_zeros(capacity), torch.zeros(capacity, dtype=torch.int32, device=x.device), zero
    # Not below t is a key above key(t) - 1; a negative or nan threshold has nothing below it.
    limit = torch.where(threshold > 0, threshold.view(torch.int32) - 1, -1)
    return _select(x, limit.view(1), capacity, False, config)


def topk(x: Tensor, k: int, config: tuple[int, int] = CONFIG) -> tuple[Tensor, Tensor]:
    """See `sparse.topk`; among equal magnitudes the first positions win."""
    n, device, (tile, warps) = x.numel(), x.device, config
    if k == 0:
        return x.new_zeros(0), torch.zeros(0, dtype=torch.int32, device=device)
    capacity = max(4096, n // 64)
    buffer = torch.empty(capacity, dtype=torch.int32, device=device)
    # low, high, keys above high, keys in the buffer, keys above those of the buffer
    state = torch.zeros(5, dtype=torch.int64, device=device)
    state[0].fill_(-1)
    state[1].fill_(0x7FFFFFFF)
    bins = torch.zeros(16, dtype=torch.int32, device=device)
    limits = _first_limits(x, k)
    programs = min(PROGRAMS, triton.cdiv(n, tile))
    options = {"TILE": tile, "num_warps": warps}
    _bracket[(programs,)](x, limits, bins, n, **options)
    _narrow[(1,)](state, limits, bins, k, capacity, FIRST=True, num_warps=1)
    _candidates[(triton.cdiv(n, tile),)](x, buffer, state, n, capacity, **options)
    for _ in range(ROUNDS):
        _bins[(programs,)](x, buffer, state, limits, bins, n, capacity, **options)
        _narrow[(1,)](state, limits, bins, k, capacity, FIRST=False, num_warps=1)
    rule = torch.stack([state[1], k - state[2]]).to(torch.int32)
    values, indices, _ = _select(x, rule, k, True, config)
    return values, indices


def _first_limits(x: Tensor, k: int) -> Tensor:
    """Keys around the k-th: at its rank in a sample, and 3.5 standard deviations of that rank to either side."""
    n = x.numel()
    sample = (x if n <= SAMPLES else x[stratified(n, SAMPLES, seed=k, device=x.device)]).float()
    keys = (sample.view(torch.int32) & 0x7FFFFFFF).sort(descending=True).values
    size = keys.numel()
    middle = k * size / n
    spread = 3.5 * max(1.0, (middle * (1 - k / n)) ** 0.5)
    ranks = [min(size - 1, max(0, round(middle + spread * side))) for side in (1, 0, -1)]
    low, centre, high = (keys[r : r + 1] for r in ranks)
    return torch.cat([low, centre, high.expand(13)])
