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


def terngrad(x: Tensor, clip: float, seed: int, lengths: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    """Codes by chance |x| / scale, and the scale: the largest magnitude, at most `clip` deviations; one per tensor."""
    pieces = [x] if lengths is None else x.split(list(lengths))
    scale = torch.stack([clipped(plain.moments(piece), clip) for piece in pieces]) if pieces else x.new_empty(0)
    return ternary_encode(x, scale, seed, lengths), scale


def clipped(moments: Tensor, clip: float) -> Tensor:
    """The largest magnitude, at most `clip` standard deviations (0: as it is)."""
    _, deviation, largest = moments.unbind()
    return torch.minimum(largest, clip * deviation) if clip else largest


def ternary_decode(packed: Tensor, scale: Tensor, count: int, lengths: tuple[int, ...] | None) -> Tensor:
    """See `plain.ternary_decode`; with lengths, one scale per tensor."""
    return _decode(plain.ternary_decode, packed, 2, (scale,), count, lengths)


def sign_residual(
    x: Tensor, residual: Tensor | None, lengths: tuple[int, ...] | None, l1: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`sign_encode` of x + residual, and what the payload does not say of it."""
    whole = added(x, residual)
    packed, means = sign_encode(whole, lengths, l1)
    return packed, means, whole - sign_decode(packed, means[0], -means[0] if l1 else means[1], x.numel(), lengths)


def ternary_residual(
    x: Tensor, residual: Tensor | None, scale: Tensor, seed: int | None, lengths: tuple[int, ...] | None
) -> tuple[Tensor, Tensor]:
    """`ternary_encode` of x + residual, and what the payload does not say of it."""
    whole = added(x, residual)
    packed = ternary_encode(whole, scale, seed, lengths)
    return packed, whole - ternary_decode(packed, scale, x.numel(), lengths)


def quantize_residual(
    x: Tensor, residual: Tensor | None, bits: int, block: int, seed: int | None, l2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_blocks` of x + residual, and what the payload does not say of it."""
    whole = added(x, residual)
    packed, scales = plain.quantize_blocks(whole, bits, block, seed, l2)
    return packed, scales, whole - plain.dequantize_blocks(packed, scales, bits, block, x.numel())


def sign_onto(
    packed: Tensor, pos: Tensor, neg: Tensor, lengths: tuple[int, ...] | None, total: Tensor, divisor: float
) -> None:
    """total = (total + decoded values) / divisor."""
    total.add_(sign_decode(packed, pos, neg, total.numel(), lengths)).div_(divisor)


def ternary_onto(packed: Tensor, scale: Tensor, lengths: tuple[int, ...] | None, total: Tensor, divisor: float) -> None:
    """total = (total + decoded values) / divisor."""
    total.add_(ternary_decode(packed, scale, total.numel(), lengths)).div_(divisor)


def dequantize_onto(packed: Tensor, scales: Tensor, bits: int, block: int, total: Tensor, divisor: float) -> None:
    """total = (total + decoded values) / divisor."""
    total.add_(plain.dequantize_blocks(packed, scales, bits, block, total.numel())).div_(divisor)


def natural_onto(codes: Tensor, total: Tensor, divisor: float) -> None:
    """total = (total + decoded values) / divisor."""
    total.add_(plain.natural_decode(codes)).div_(divisor)


def added(x: Tensor, residual: Tensor | None) -> Tensor:
    """x + residual in float32; x itself if there is none."""
    return x.float() if residual is None else x.float() + residual


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
