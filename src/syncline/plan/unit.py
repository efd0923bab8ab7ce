"""The rows of a plan, and the parameters that they are made of: plain data."""

from dataclasses import dataclass

import torch

Part = tuple[str, int]
"""One launch: a unit's name and which of its parts."""

Fact = str | int | float | bool
"""What a plan may say about itself."""


@dataclass(frozen=True)
class Shape:
    """A parameter that trains; lists of them are in registration order, which stands for forward order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def values(self) -> int:
        """How many numbers its gradient has."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient, uncompressed."""
        return self.values * self.dtype.itemsize


@dataclass(frozen=True)
class Unit:
    """One row of a plan: parameters whose gradients are sent as one, how, and in how many parts."""

    name: str
    parameters: tuple[str, ...]
    codec: str = "none"
    exchange: str = "allreduce"
    partitions: int = 1

    def label(self, part: int) -> str:
        """A part's name for a person: the unit's own if it is whole, else `unit[part]`."""
        return self.name if self.partitions == 1 and part == 0 else f"{self.name}[{part}]"
