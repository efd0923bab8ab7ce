"""Triton: a magnitude by its rank in a sample, in one launch: where selection starts."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.codecs.kernels import rng
from syncline.codecs.kernels.gpu_launch import launch
from syncline.codecs.kernels.gpu_random import random_unit

# One program holds the whole sample: 32 values per thread.
LARGEST = 1 << 15


@triton.jit(do_not_specialize=["n", "samples", "rank", "k0", "k1"])
def _sample(x_ptr, out_ptr, n, samples, rank, k0, k1, ALL: tl.constexpr, SIZE: tl.constexpr):
    number = tl.arange(0, SIZE)
    inside = number < samples
    if ALL:
        place = number.to(tl.int64)
    else:  # to the bit what `sparse.stratified` draws
        noise = random_unit(tl.program_id(0).to(tl.int64), number, k0, k1)
        width = n.to(tl.float64) / samples.to(tl.float64)
        place = ((number.to(tl.float64) + noise.to(tl.float64)) * width).to(tl.int64)
        place = tl.minimum(place, n - 1)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    # Bit by bit the largest key that more than `rank` keys reach; 0 if there is none.
    best = rank * 0
    for i in range(31):
        trial = best | (1 << (30 - i))
        reach = tl.sum((key >= trial).to(tl.int32), axis=0)
        best = tl.where(reach > rank, trial, best)
    tl.store(out_ptr, best.to(tl.int32).to(tl.float32, bitcast=True))


def ranked(x: Tensor, rank: int, *, samples: int, seed: int) -> Tensor:
    """The magnitude of rank 0, 1, .. in a sample of at most `LARGEST`, 0-d float32; 0 past the sample's end."""
    n = x.numel()
    out = torch.empty((), dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(min(n, samples))
    k0, k1 = rng.keys(seed)
    warps = max(1, min(32, size // 512))
    launch(_sample, 1, x, out, n, min(n, samples), rank, k0, k1, ALL=n <= samples, SIZE=size, warps=warps)
    return out


def sampled_threshold(x: Tensor, ratio: float, seed: int, samples: int) -> Tensor:
    """See `sparse.sampled_threshold`."""
    size = min(x.numel(), samples)
    keep = max(1, min(size, round(ratio * size)))
    return ranked(x, keep - 1, samples=samples, seed=seed)
