"""Pack a payload into one contiguous byte buffer for the network, and unpack it.

No header, no padding: both sides know shapes and dtypes from the codec and the gradient's shape.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def layout_of(payload: Sequence[Tensor]) -> Layout:
    """Shape and dtype of every tensor of a payload."""
    return tuple((tuple(part.shape), part.dtype) for part in payload)


def nbytes(layout: Layout) -> int:
    """Bytes of a packed payload of this layout."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)


def pack(payload: Sequence[Tensor]) -> Tensor:
    """The payload as one flat uint8 tensor; a payload of one contiguous tensor is not copied."""
    parts = [part.detach().contiguous().reshape(-1).view(torch.uint8) for part in payload]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(buffer: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """The tensors of a buffer, as views where alignment allows; `ValueError` if the size does not match the layout."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise ValueError(f"a payload is a flat uint8 tensor, not {buffer.dtype} of shape {tuple(buffer.shape)}")
    if buffer.numel() != nbytes(layout):
        raise ValueError(f"the payload has {buffer.numel()} bytes and must have {nbytes(layout)}: it is damaged")
    out, at = [], 0
    for shape, dtype in layout:
        size = torch.Size(shape).numel() * dtype.itemsize
        piece = buffer[at : at + size]
        if piece.storage_offset() % dtype.itemsize or not piece.is_contiguous():
            piece = piece.clone()
        out.append(piece.view(dtype).view(shape))
        at += size
    return tuple(out)
