"""Confidence intervals of trimmed means by a block bootstrap: neighbouring steps are similar, so blocks are drawn."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TRIM = 0.1
"""The share of the slowest and of the fastest steps that a mean leaves out."""
STRAY = 0.02
"""The same for a mean in which slow steps count unless they are very few."""
DRAWS = 1000
_STUDENT = 1.21  # (z^2 + 1) / 4 at 95%: the first-order term by which Student's t is wider than the normal
_AT_ONCE = 2_000_000  # numbers of a column that are in memory at once


def trimmed(rows: Sequence[Sequence[float]], *, trim: float = TRIM) -> list[float]:
    """The trimmed mean of each column over the steps (rows), trimmed by the first column, the step time.

    The same steps are left out of all columns, so that the phases of a step still sum to it.

    >>> trimmed([[1.0, 1.0], [2.0, 0.0], [3.0, 3.0], *[[2.0, 1.0]] * 7])
    [2.0, 0.875]
    """
    table = torch.tensor(rows, dtype=torch.float64)
    kept = _inner(table[:, 0].unsqueeze(0), trim)[0]
    return [float(value) for value in table[kept].mean(0)]


def draws(rows: Sequence[Sequence[float]], *, seed: int, count: int = DRAWS, trim: float = TRIM) -> Tensor:
    """`trimmed` of resampled runs, one row per draw; deterministic for a seed.

    Steps are drawn in blocks that wrap around from the end to the beginning. A few blocks vary less than the steps that
    they are drawn from, so deviations are stretched, as Student's t does for small samples.
    """
    table = torch.tensor(rows, dtype=torch.float64)
    n, columns = table.shape
    block = _block(table[:, 0])
    random = torch.Generator().manual_seed(seed)
    made = []
    for first in range(0, count, max(1, _AT_ONCE // n)):
        some = min(count - first, max(1, _AT_ONCE // n))
        starts = torch.randint(n, (some, math.ceil(n / block), 1), generator=random)
        places = ((starts + torch.arange(block)) % n).reshape(some, -1)[:, :n]
        kept = places.gather(1, _inner(table[:, 0][places], trim))
        made.append(torch.stack([table[:, column][kept].mean(1) for column in range(columns)], dim=1))
    found = torch.cat(made)
    centre = torch.tensor(trimmed(rows, trim=trim), dtype=torch.float64)
    free = max(1.0, 2 * (n / block - 1))  # degrees of freedom of the two samples that are compared
    stretch = math.sqrt(n / max(1, n - block)) * (1 + _STUDENT / free)
    return centre + (found - centre) * stretch


def _block(times: Tensor) -> int:
    """The block length: n^(1/3), longer if neighbouring steps are more similar."""
    n = len(times)
    off = times - times.median()
    limit = 3 * float(off.abs().median())
    off = off.clamp(-limit, limit)  # a single slow step says nothing about its neighbour
    spread = float((off * off).sum())
    alike = min(0.9, max(0.0, float((off[1:] * off[:-1]).sum()) / spread)) if spread else 0.0
    # The best length for a series with this autocorrelation (Politis and White).
    root = float(n ** (1 / 3))
    best = 1.82 * float((alike / (1 - alike**2)) ** (2 / 3)) * root
    return max(1, min(n // 4, round(max(best, root))))


def interval(values: Tensor, *, confidence: float) -> tuple[float, float]:
    """The central interval that holds this share of the draws."""
    tail = (1 - confidence) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype))
    return float(low), float(high)


def _inner(times: Tensor, trim: float) -> Tensor:
    """By row, the indices without the shortest and the longest steps."""
    n = times.shape[1]
    cut = int(n * trim)
    return times.argsort(dim=1, stable=True)[:, cut : n - cut]
