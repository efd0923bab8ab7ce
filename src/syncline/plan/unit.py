"""`Unit`, a row of a plan, and `Shape`, a parameter: plain data."""

from dataclasses import dataclass

import torch
from torch import Tensor

Part = tuple[str, int]
"""One launch: a unit's name and which of its parts."""

Fact = str | int | float | bool
"""A value in the `about` table of a plan."""


@dataclass(frozen=True)
class Shape:
    """A trained parameter. Lists are in registration order, which is taken as forward order."""

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


def shape_of(name: str, parameter: Tensor) -> Shape:
    """A parameter as plans and codecs see it: a complex one has a last dimension of 2, real and imaginary parts."""
    if parameter.is_complex():
        return Shape(name, (*parameter.shape, 2), parameter.dtype.to_real())
    return Shape(name, tuple(parameter.shape), parameter.dtype)


@dataclass(frozen=True)
class Unit:
    """One row of a plan: parameters whose gradients are sent as one, how, and in how many parts."""

    name: str
    parameters: tuple[str, ...]
    codec: str = "none"
    exchange: str = "allreduce"
    partitions: int = 1

    def label(self, part: int) -> str:
        """Readable name of a part: the unit's name if it has one part, else `unit[part]`."""
        return self.name if self.partitions == 1 and part == 0 else f"{self.name}[{part}]"
