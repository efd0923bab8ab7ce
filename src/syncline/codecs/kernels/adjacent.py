"""Memory for the tensors of a payload, one after the other, so that sending it needs no copy (`wire.pack`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

Part = tuple[Sequence[int], torch.dtype]


def adjacent(device: torch.device, *parts: Part) -> list[Tensor]:
    """Empty tensors of these shapes and dtypes in one buffer; separate ones where that would misalign one of them."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parts]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if any(start % dtype.itemsize for start, (_, dtype) in zip(starts, parts, strict=True)):
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in parts]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    pieces = buffer.split(sizes)
    return [piece.view(dtype).view(shape) for piece, (shape, dtype) in zip(pieces, parts, strict=True)]
