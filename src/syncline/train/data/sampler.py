"""The sampler: sample indices of a rank at a step, a function of seed, step and world size only.

All strategies see the same samples in the same order.
"""

import torch
from torch import Tensor

from syncline.errors import UsageError


class Sampler:
    """An endless stream of global batches over shuffled epochs; rank r takes the r-th equal slice of each batch."""

    def __init__(self, length: int, *, batch: int, seed: int, rank: int = 0, workers: int = 1) -> None:
        if batch % workers:
            fitting = max(workers, batch // workers * workers)
            raise UsageError(f"batch {batch} does not divide over {workers} ranks: use --batch {fitting}")
        if batch > length:
            raise UsageError(f"batch {batch} is larger than the data set of {length} samples: use --batch {length}")
        self.batch, self.seed, self.rank, self.workers = batch, seed, rank, workers
        self.batches = length // batch
        self.length = length
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __call__(self, step: int, part: tuple[int, int] | None = None) -> tuple[int, Tensor]:
        """The epoch and this rank's sample indices at a global step, or those of a `part` (number, how many)."""
        epoch, position = divmod(step, self.batches)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(self.length, generator=generator)
            self._epoch = epoch
        number, parts = part or (self.rank, self.workers)
        share = self.batch // parts
        start = position * self.batch + number * share
        return epoch, self._order[start : start + share]
