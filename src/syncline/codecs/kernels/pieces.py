"""The reference of the operators that take several tensors as one: each piece after the other, on any device."""

from collections.abc import Callable

import torch
from torch import Tensor

from syncline.codecs.kernels import plain


def sign_encode(x: Tensor, lengths: tuple[int, ...] | None, l1: bool) -> tuple[Tensor, Tensor]:
    """Packed bits and means: (2, pieces), positive side first; (1, pieces) mean magnitudes with `l1`."""
    encode = plain.sign_encode_l1 if l1 else plain.sign_encode
    pieces = [x] if lengths is None else x.split(list(lengths))
    parts = [encode(piece) for piece in pieces]
    if not parts:
        return x.new_empty(0, dtype=torch.uint8), x.new_empty((1 if l1 else 2, 0), dtype=torch.float32)
    means = [torch.stack(list(part[1:])) for part in parts]
    return torch.cat([part[0] for part in parts]), torch.stack(means, dim=1)


def sign_decode(packed: Tensor, pos: Tensor, neg: Tensor, count: int, lengths: tuple[int, ...] | None) -> Tensor:
    """See `plain.sign_decode`; with lengths, one mean per tensor."""
    return _decode(plain.sign_decode, packed, 1, (pos, neg), count, lengths)


def ternary_encode(x: Tensor, scale: Tensor, seed: int | None, lengths: tuple[int, ...] | None) -> Tensor:
    """Codes by threshold `scale`, or with a seed by chance |x| / scale; with lengths, one scale per tensor."""
    pieces = [x] if lengths is None else x.split(list(lengths))
    limits = scale.reshape(-1)
    parts = [
        plain.ternary_encode(piece, limit) if seed is None else plain.terngrad_encode(piece, limit, seed)
        for piece, limit in zip(pieces, limits, strict=True)
    ]
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8)


def ternary_decode(packed: Tensor, scale: Tensor, count: int, lengths: tuple[int, ...] | None) -> Tensor:
    """See `plain.ternary_decode`; with lengths, one scale per tensor."""
    return _decode(plain.ternary_decode, packed, 2, (scale,), count, lengths)


def _decode(
    decode: Callable[..., Tensor],
    packed: Tensor,
    bits: int,
    scales: tuple[Tensor, ...],
    count: int,
    lengths: tuple[int, ...] | None,
) -> Tensor:
    sizes = (count,) if lengths is None else lengths
    pieces = packed.split([(n * bits + 7) // 8 for n in sizes])
    flat = [scale.reshape(-1) for scale in scales]
    parts = [decode(piece, *s, n) for piece, n, *s in zip(pieces, sizes, *flat, strict=True)]
    return torch.cat(parts) if parts else packed.new_empty(0, dtype=torch.float32)
