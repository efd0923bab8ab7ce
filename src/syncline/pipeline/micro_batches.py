"""Micro-batches of equal shape from a batch of any size: the last ones are padded, and padding has no weight."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatches:
    """The tensors of a batch in micro-batches of `rows` rows each; `counts` are the rows that are real samples."""

    parts: tuple[tuple[Tensor, ...], ...]
    counts: tuple[int, ...]
    rows: int

    @property
    def samples(self) -> int:
        """The number of real samples."""
        return sum(self.counts)


def rows_needed(samples: int, count: int) -> int:
    """The rows of a micro-batch if `count` of them must hold all samples."""
    return max(1, -(-samples // count))


def split(batch: Sequence[Tensor], count: int, *, rows: int | None = None) -> MicroBatches:
    """Split a batch into `count` micro-batches of `rows` rows (default: as few as needed).

    A padding row repeats the last sample of the batch, or is made of ones where the batch is empty.
    """
    samples = len(batch[0])
    rows = rows_needed(samples, count) if rows is None else rows
    assert rows * count >= samples
    padded = [_pad(tensor, rows * count) for tensor in batch]
    parts = tuple(tuple(tensor[at * rows : (at + 1) * rows] for tensor in padded) for at in range(count))
    return MicroBatches(parts, tuple(min(rows, max(0, samples - at * rows)) for at in range(count)), rows)


def _pad(tensor: Tensor, length: int) -> Tensor:
    missing = length - len(tensor)
    if not missing:
        return tensor
    last = tensor[-1:] if len(tensor) else torch.ones_like(tensor.new_empty(1, *tensor.shape[1:]))
    return torch.cat([tensor, last.expand(missing, *tensor.shape[1:])])
