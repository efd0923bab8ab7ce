"""The reference of every fused operator with the fused signature: several pieces one after another, any device."""

from collections.abc import Callable

import torch
from torch import Tensor

from syncline.codecs.kernels.plain import (
    dequantize_blocks,
    moments,
    natural_decode,
    natural_encode,
    pack_bits,
    quantize_blocks,
    saturate,
    unpack_bits,
)
from syncline.codecs.kernels.plain import sign_decode as _sign_decode
from syncline.codecs.kernels.plain import sign_encode as _sign_encode
from syncline.codecs.kernels.plain import sign_encode_l1 as _sign_encode_l1
from syncline.codecs.kernels.plain import ternary_decode as _ternary_decode
from syncline.codecs.kernels.plain import ternary_encode as _ternary_encode
from syncline.codecs.kernels.plain import terngrad_encode as _terngrad_encode
from syncline.codecs.kernels.sparse import compact, sampled_threshold, topk

__all__ = [
    "compact",
    "dequantize_blocks",
    "moments",
    "natural_decode",
    "natural_encode",
    "pack_bits",
    "quantize_blocks",
    "sampled_threshold",
    "saturate",
    "sign_decode",
    "sign_encode",
    "ternary_decode",
    "ternary_encode",
    "topk",
    "unpack_bits",
]


def sign_encode(x: Tensor, lengths: tuple[int, ...] | None, l1: bool) -> tuple[Tensor, Tensor]:
    """Packed bits and means: (2, pieces), positive side first; (1, pieces) mean magnitudes with `l1`."""
    encode = _sign_encode_l1 if l1 else _sign_encode
    pieces = [x] if lengths is None else x.split(list(lengths))
    parts = [encode(piece) for piece in pieces]
    if not parts:
        return x.new_empty(0, dtype=torch.uint8), x.new_empty((1 if l1 else 2, 0), dtype=torch.float32)
    means = [torch.stack(list(part[1:])) for part in parts]
    return torch.cat([part[0] for part in parts]), torch.stack(means, dim=1)


def sign_decode(packed: Tensor, pos: Tensor, neg: Tensor, count: int, lengths: tuple[int, ...] | None) -> Tensor:
    """See `plain.sign_decode`; with lengths, one mean per tensor."""
    return _decode(_sign_decode, packed, 1, (pos, neg), count, lengths)


def ternary_encode(x: Tensor, scale: Tensor, seed: int | None, lengths: tuple[int, ...] | None) -> Tensor:
    """Codes by threshold `scale`, or with a seed by chance |x| / scale; with lengths, one scale per tensor."""
    pieces = [x] if lengths is None else x.split(list(lengths))
    limits = scale.reshape(-1)
    if seed is None:
        parts = [_ternary_encode(piece, limit) for piece, limit in zip(pieces, limits, strict=True)]
    else:
        parts = [_terngrad_encode(piece, limit, seed) for piece, limit in zip(pieces, limits, strict=True)]
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8)


def ternary_decode(packed: Tensor, scale: Tensor, count: int, lengths: tuple[int, ...] | None) -> Tensor:
    """See `plain.ternary_decode`; with lengths, one scale per tensor."""
    return _decode(_ternary_decode, packed, 2, (scale,), count, lengths)


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
