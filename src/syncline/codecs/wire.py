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
    """The payload as one flat uint8 tensor; not copied if its tensors already lie one after the other in memory."""
    parts = [part.detach().contiguous().reshape(-1).view(torch.uint8) for part in payload]
    ends = [part.data_ptr() + part.numel() for part in parts]
    follows = all(part.data_ptr() == end for part, end in zip(parts[1:], ends, strict=False))
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if not follows or len(storages) > 1 or parts[0].device.type == "meta":
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    first, total = parts[0], sum(part.numel() for part in parts)
    return first.as_strided((total,), (1,), first.storage_offset())


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
