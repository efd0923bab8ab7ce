"""Which samples a rank sees: a function of seed, step and world size only, so that strategies see the same."""

import torch
from torch import Tensor

from syncline.errors import UsageError


class Sampler:
    """An endless stream of global batches over shuffled passes; rank r takes the r-th equal slice of each batch."""

    def __init__(self, length: int, *, batch: int, seed: int, rank: int = 0, workers: int = 1) -> None:
        if batch % workers:
            fitting = max(workers, batch // workers * workers)
            raise UsageError(f"batch {batch} does not divide over {workers} ranks: use --batch {fitting}")
        if batch > length:
            raise UsageError(f"batch {batch} is larger than the data set of {length} samples: use --batch {length}")
        self.batch, self.seed, self.rank, self.workers = batch, seed, rank, workers
        self.batches = length // batch
        self.length = length
        self._pass = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __call__(self, step: int) -> tuple[int, Tensor]:
        """The pass over the data and this rank's sample indices at a global step."""
        number, position = divmod(step, self.batches)
        if number != self._pass:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            self._order = torch.randperm(self.length, generator=generator)
            self._pass = number
        share = self.batch // self.workers
        start = position * self.batch + self.rank * share
        return number, self._order[start : start + share]
