"""Triton: large values into a fixed-size list in index order - by threshold, or exactly the k largest.

Magnitudes are compared as the integers of their bits, which order as the floats do, with nan above inf. The tensor is
read once: every tile appends what reaches a threshold to a buffer, in whatever order tiles come, and notes where its
part lies. What follows reads that buffer alone: the k-th key is found there by its digits, and a running sum over the
tiles gives each its place in the result. For the k largest the threshold comes from a sample; if that misled, or more
was found than fits, the same kernels read the whole tensor instead, slower and as exact. The host never waits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels import gpu_sample
from syncline.codecs.kernels.gpu_launch import launch
from syncline.codecs.kernels.gpu_tile import load_tile

# Values per program, warps: 16 values per thread.
CONFIG = (2048, 4)
SAMPLES = 1 << 14
# Deviations of the sample's rank that the threshold lies below its estimate.
MARGIN = 4.5
PROGRAMS = 132 * 4
# Tiles that a program orders, and how many values of each at a time: one per thread of a warp.
TILES, BLOCK = 16, 32
# The int32 that the kernels share: how many keys the buffer was offered; then for each of four rounds and the end
# (digits known, rank among the keys that share them); then four histograms.
_RULES = tl.constexpr(2)
_BINS = tl.constexpr(16)
_STATE = 16 + 4 * 256


@dataclass(frozen=True)
class _Found:
    """What `_collect` wrote: pairs (position, the value's bits) as int64, and for each tile where its part lies."""

    pairs: Tensor
    starts: Tensor
    counts: Tensor
    state: Tensor


@triton.jit
def _key(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["n", "room"])
def _collect(x_ptr, threshold_ptr, pairs_ptr, state_ptr, starts_ptr, counts_ptr, n, room, TILE: tl.constexpr):
    pid = tl.program_id(0)
    start = pid.to(tl.int64) * TILE
    threshold = tl.load(threshold_ptr)
    # A thread holds four neighbours of each of four runs: the compiler deals out dimension 0 to the threads.
    thread = tl.arange(0, TILE // 16)[:, None, None] * 4
    run = tl.arange(0, 4)[None, :, None] * (TILE // 4)
    local = run + thread + tl.arange(0, 4)[None, None, :]
    count = tl.minimum(n - start, TILE).to(tl.int32)
    x = load_tile(x_ptr + start, local, count, TILE).to(tl.float32)
    keep = ~(tl.abs(x) < threshold) & (local < count)
    within = tl.cumsum(keep.to(tl.int32), axis=2)
    # The counts of a thread's four runs in 16 bits each of one integer, so that one scan serves all.
    lane = tl.arange(0, 4)[None, :] * 16
    own = tl.sum(tl.sum(keep.to(tl.int32), axis=2).to(tl.int64) << lane, axis=1)
    total = tl.sum(own, axis=0)
    runs_before = (total << 16) + (total << 32) + (total << 48)
    before = tl.cumsum(own, axis=0) - own + runs_before
    found = (((runs_before >> 48) + (total >> 48)) & 0xFFFF).to(tl.int32)
    first = tl.atomic_add(state_ptr, found, sem="relaxed")
    tl.store(starts_ptr + pid, first)
    tl.store(counts_ptr + pid, found)
    if first + found <= room:
        offset = first + ((before[:, None] >> lane) & 0xFFFF).to(tl.int32) - 1
        place = offset[:, :, None] + within
        position = (start.to(tl.int32) + local).to(tl.uint32).to(tl.int64)
        pair = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | position
        tl.store(pairs_ptr + place, pair, mask=keep)


@triton.jit
def _narrow(state_ptr, need, ROUND: tl.constexpr):
    """The k-th key's digits so far, from the histogram of the round before; kept with its rank among their keys."""
    prefix = need * 0
    rank = need
    if ROUND > 0:
        digit = tl.arange(0, 256)
        bins = tl.load(state_ptr + _BINS + (ROUND - 1) * 256 + digit)
        reach = tl.cumsum(bins, axis=0, reverse=True)
        rank = tl.load(state_ptr + _RULES + (ROUND - 1) * 2 + 1)
        best = tl.max(tl.where(reach >= rank, digit, 0), axis=0)
        prefix = tl.load(state_ptr + _RULES + (ROUND - 1) * 2) * 256 + best
        rank -= tl.sum(tl.where(digit > best, bins, 0), axis=0)
    if tl.program_id(0) == 0:
        tl.store(state_ptr + _RULES + ROUND * 2, prefix)
        tl.store(state_ptr + _RULES + ROUND * 2 + 1, rank)
    return prefix


@triton.jit(do_not_specialize=["n", "room", "need"])
def _digits(x_ptr, pairs_ptr, state_ptr, n, room, need, ROUND: tl.constexpr, TILE: tl.constexpr):
    """A histogram of the next eight bits of the keys that share the k-th's bits so far."""
    held = tl.load(state_ptr)
    small = (held <= room) & (held >= need)
    total = tl.where(small, held, n)
    prefix = _narrow(state_ptr, need, ROUND)
    local = tl.arange(0, TILE)
    bins = tl.zeros([256], dtype=tl.int32)
    start = tl.program_id(0).to(tl.int64) * TILE
    while start < total:
        inside = start + local < total
        x, _position = _values(x_ptr, pairs_ptr, small, start + local, inside)
        key = _key(x)
        if ROUND > 0:
            inside = inside & (key >> (32 - 8 * ROUND) == prefix)
        bins += tl.histogram((key >> (24 - 8 * ROUND)) & 255, 256, mask=inside)
        start += tl.num_programs(0).to(tl.int64) * TILE
    tl.atomic_add(state_ptr + _BINS + ROUND * 256 + tl.arange(0, 256), bins, mask=bins > 0, sem="relaxed")


@triton.jit
def _values(x_ptr, pairs_ptr, small, place, inside):
    """Values as float32 and their positions, of the buffer or of the tensor itself."""
    if small:
        pair = tl.load(pairs_ptr + place, mask=inside, other=0)
        x = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        position = pair.to(tl.int32)
    else:
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        position = place.to(tl.int32)
    return x, position


@triton.jit
def _parts(state_ptr, starts_ptr, counts_ptr, n, room, need, TILE: tl.constexpr, TILES: tl.constexpr):
    """Where each tile's values are: its part of the buffer, or the tile itself where the buffer cannot serve."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    valid = tile < tl.cdiv(n, TILE)
    held = tl.load(state_ptr)
    small = (held <= room) & (held >= need)
    start = tile.to(tl.int64) * TILE
    count = tl.maximum(tl.minimum(n - start, TILE), 0).to(tl.int32)
    if small:
        start = tl.load(starts_ptr + tile, mask=valid, other=0).to(tl.int64)
        count = tl.load(counts_ptr + tile, mask=valid, other=0)
    return tile, valid, small, start, count


@triton.jit(do_not_specialize=["n", "room", "need"])
def _tally(
    x_ptr,
    pairs_ptr,
    state_ptr,
    starts_ptr,
    counts_ptr,
    tallies_ptr,
    n,
    room,
    need,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile's keys above the k-th, and those equal to it in the high half of an int64."""
    limit = _narrow(state_ptr, need, 4)
    tile, valid, small, start, count = _parts(state_ptr, starts_ptr, counts_ptr, n, room, need, TILE, TILES)
    above = tl.zeros([TILES], dtype=tl.int32)
    equal = tl.zeros([TILES], dtype=tl.int32)
    # Values along dimension 0, which the compiler deals out to the threads; a tile a column.
    local = tl.arange(0, BLOCK)[:, None]
    most = tl.max(count, axis=0)
    while most > 0:
        inside = local < count[None, :]
        x, _position = _values(x_ptr, pairs_ptr, small, start[None, :] + local, inside)
        key = tl.where(inside, _key(x), -1)
        above += tl.sum((key > limit).to(tl.int32), axis=0)
        equal += tl.sum((key == limit).to(tl.int32), axis=0)
        local += BLOCK
        most -= BLOCK
    tl.store(tallies_ptr + tile, above.to(tl.int64) + (equal.to(tl.int64) << 32), mask=valid)


@triton.jit(do_not_specialize=["n", "room", "need", "capacity"])
def _place(
    x_ptr,
    threshold_ptr,
    pairs_ptr,
    state_ptr,
    starts_ptr,
    counts_ptr,
    tallies_ptr,
    ends_ptr,
    out_ptr,
    indices_ptr,
    n,
    room,
    need,
    capacity,
    TIES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile, valid, small, start, count = _parts(state_ptr, starts_ptr, counts_ptr, n, room, need, TILE, TILES)
    # Ends are inclusive running sums: what lies before a tile is its end less its own.
    before = tl.load(ends_ptr + tile, mask=valid, other=0) - tl.load(tallies_ptr + tile, mask=valid, other=0)
    if TIES:
        limit = tl.load(state_ptr + _RULES + 8)
        ties = tl.load(state_ptr + _RULES + 9)
        equals = (before >> 32).to(tl.int32)
        filled = (before & 0x7FFFFFFF).to(tl.int32) + tl.minimum(equals, ties)
    else:
        threshold = tl.load(threshold_ptr)
        filled = before.to(tl.int32)
    local = tl.arange(0, BLOCK)[:, None]
    most = tl.max(count, axis=0)
    while most > 0:
        inside = local < count[None, :]
        x, position = _values(x_ptr, pairs_ptr, small, start[None, :] + local, inside)
        if TIES:
            key = tl.where(inside, _key(x), -1)
            equal = (key == limit).to(tl.int32)
            rank = equals[None, :] + tl.cumsum(equal, axis=0)
            keep = (key > limit) | ((key == limit) & (rank <= ties))
            equals += tl.sum(equal, axis=0)
        else:
            keep = ~(tl.abs(x) < threshold) & inside
        chosen = keep.to(tl.int32)
        place = filled[None, :] + tl.cumsum(chosen, axis=0) - 1
        filled += tl.sum(chosen, axis=0)
        keep = keep & (place < capacity)
        tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=keep)
        tl.store(indices_ptr + place, position, mask=keep)
        local += BLOCK
        most -= BLOCK


def _gather(x: Tensor, threshold: Tensor, room: int, config: tuple[int, int]) -> _Found:
    """All values that are not below the threshold, tile by tile; no more than `room` are of use."""
    n, device, (tile, warps) = x.numel(), x.device, config
    tiles = triton.cdiv(n, tile)
    pairs = torch.empty(room, dtype=torch.int64, device=device)
    starts = torch.empty(tiles, dtype=torch.int32, device=device)
    counts = torch.empty(tiles, dtype=torch.int32, device=device)
    state = torch.zeros(_STATE, dtype=torch.int32, device=device)
    launch(_collect, tiles, x, threshold, pairs, state, starts, counts, n, room, TILE=tile, warps=warps)
    return _Found(pairs, starts, counts, state)


def _ordered(
    x: Tensor, threshold: Tensor, found: _Found, tallies: Tensor, need: int, out: tuple[Tensor, Tensor], tile: int
) -> Tensor:
    """Fill `out`, values and positions, in index order; gives the running sums of the tallies."""
    ends = tallies.cumsum(0, dtype=tallies.dtype)
    parts = (found.pairs, found.state, found.starts, found.counts, tallies, ends)
    sizes = (x.numel(), found.pairs.numel(), need, out[0].numel())
    modes = {"TIES": need > 0, "TILE": tile, "TILES": TILES, "BLOCK": BLOCK}
    programs = triton.cdiv(tallies.numel(), TILES)
    launch(_place, programs, x, threshold, *parts, *out, *sizes, **modes, warps=4)
    return ends


def compact(
    x: Tensor, threshold: Tensor, capacity: int, config: tuple[int, int] = CONFIG
) -> tuple[Tensor, Tensor, Tensor]:
    """See `sparse.compact`."""
    n = x.numel()
    values, indices = x.new_zeros(capacity), torch.zeros(capacity, dtype=torch.int32, device=x.device)
    if n == 0 or capacity == 0:
        return values, indices, torch.zeros((), dtype=torch.int32, device=x.device)
    # More than the capacity, so that a threshold that lets a little more through costs nothing.
    found = _gather(x, threshold, min(n, capacity + n // 64), config)
    ends = _ordered(x, threshold, found, found.counts, 0, (values, indices), config[0])
    return values, indices, ends[-1].clamp(max=capacity)


def topk(x: Tensor, k: int, config: tuple[int, int] = CONFIG) -> tuple[Tensor, Tensor]:
    """See `sparse.topk`; among equal magnitudes the first positions win."""
    n = x.numel()
    values = torch.empty(k, dtype=x.dtype, device=x.device)
    indices = torch.empty(k, dtype=torch.int32, device=x.device)
    if k == 0:
        return values, indices
    threshold = _first_threshold(x, k)
    found = _gather(x, threshold, min(n, k + k // 4 + n // 64), config)
    sizes = (n, found.pairs.numel(), k)
    programs = min(PROGRAMS, triton.cdiv(n, 1024))
    for number in range(4):
        launch(_digits, programs, x, found.pairs, found.state, *sizes, ROUND=number, TILE=1024, warps=4)
    tallies = torch.empty(found.counts.numel(), dtype=torch.int64, device=x.device)
    parts = (found.pairs, found.state, found.starts, found.counts, tallies)
    modes = {"TILE": config[0], "TILES": TILES, "BLOCK": BLOCK}
    launch(_tally, triton.cdiv(tallies.numel(), TILES), x, *parts, *sizes, **modes, warps=4)
    _ordered(x, threshold, found, tallies, k, (values, indices), config[0])
    return values, indices


def _first_threshold(x: Tensor, k: int) -> Tensor:
    """A magnitude that a little more than k values reach, by a sample; 0 if that may be all of them."""
    n = x.numel()
    size = min(n, SAMPLES)
    middle = k * size / n
    spread = MARGIN * (1 + (middle * (1 - k / n)) ** 0.5)
    return gpu_sample.ranked(x, round(middle + spread), samples=SAMPLES, seed=k)
