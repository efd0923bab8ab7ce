"""Picking out the large values and putting them back: top-k, threshold by sampling, compaction, scatter-add."""

import torch
from torch import Tensor

from syncline.codecs.kernels.rng import uniform


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k values of largest magnitude and where they are, in index order. nan counts as the largest."""
    indices = x.abs().topk(k, sorted=False).indices.sort().values
    return x[indices], indices.to(torch.int32)


def sampled_threshold(x: Tensor, ratio: float, seed: int, samples: int) -> Tensor:
    """The magnitude that about `ratio` of x reaches, from one random element in each of `samples` strata."""
    n = x.numel()
    picked = x if samples >= n else x[stratified(n, samples, seed=seed, device=x.device)]
    picked = picked.float().abs()
    keep = max(1, min(picked.numel(), round(ratio * picked.numel())))
    return picked.topk(keep).values[-1]


def stratified(n: int, samples: int, *, seed: int, device: torch.device) -> Tensor:
    """One random position in each of `samples` equal parts of 0..n: less variance than free sampling."""
    # float64 holds every index exactly.
    edge = torch.arange(samples, dtype=torch.float64, device=device)
    noise = uniform(samples, seed=seed, device=device).double()
    return ((edge + noise) * (n / samples)).long().clamp_(max=n - 1)


def compact(x: Tensor, threshold: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first `capacity` elements that are not below the threshold; unused slots hold value 0, index 0."""
    mask = ~(x.abs().float() < threshold)
    place = mask.cumsum(0) - 1
    slot = torch.where(mask & (place < capacity), place, capacity)  # the last slot is thrown away
    values = torch.zeros(capacity + 1, dtype=x.dtype, device=x.device)
    indices = torch.zeros(capacity + 1, dtype=torch.int32, device=x.device)
    values.index_copy_(0, slot, x)
    indices.index_copy_(0, slot, torch.arange(x.numel(), dtype=torch.int32, device=x.device))
    return values[:capacity], indices[:capacity], mask.sum().clamp(max=capacity).to(torch.int32)


def scatter_unique(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out[indices] += values where no position with a non-zero value repeats; positions outside are left out."""
    scatter_add(out, indices, values, True)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, unique: bool) -> Tensor:
    """out[indices] += values; indices outside are an error on the CPU and are left out on CUDA (no host sync)."""
    index = indices.long()
    values = values.to(out.dtype)
    if index.device.type == "cpu":
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= out.numel()):
            raise ValueError(f"an index is outside 0..{out.numel() - 1}: the payload is corrupt or of another tensor")
    else:
        inside = (index >= 0) & (index < out.numel()) & (values != 0)
        values = torch.where(inside, values, 0)
        # Unused slots all say position 0: so many atomics there would wait for each other.
        spread = torch.arange(index.numel(), device=index.device) % max(1, out.numel())
        index = torch.where(inside, index, spread)
    if unique or index.device.type == "cpu":
        return out.index_add_(0, index, values)
    # Atomics add in any order; this sorts first, so that every rank gets the same bits.
    return out.index_put_((index,), values, accumulate=True)
