"""The operators on the CPU: the compiled functions where there are any, else vectorised torch, else the reference."""

import ctypes

import torch
from torch import Tensor

from syncline.codecs.kernels import cpu_torch, native, pieces, plain, rng, sparse

# Below this the call costs more than the passes it saves, and no compiler need ever run.
_SMALL = 4096
_LARGEST_BLOCK = 4096
_BYTE = torch.uint8


def _compiled(count: int) -> ctypes.CDLL | None:
    return native.library() if count >= _SMALL else None


def sign_encode(x: Tensor, lengths: tuple[int, ...] | None, l1: bool) -> tuple[Tensor, Tensor]:
    """Packed bits and means: (2, pieces), positive side first; (1, pieces) mean magnitudes with `l1`."""
    encode = _sign_encode if _compiled(x.numel()) else cpu_torch.sign_encode
    if lengths is None:
        packed, means = encode(x, l1)
        return packed, means[:, None]
    parts = [encode(piece, l1) for piece in x.split(list(lengths))]
    if not parts:
        return torch.empty(0, dtype=_BYTE), torch.empty((1 if l1 else 2, 0))
    return torch.cat([p for p, _ in parts]), torch.stack([m for _, m in parts], dim=1)


def _sign_encode(x: Tensor, l1: bool) -> tuple[Tensor, Tensor]:
    library = native.library()
    assert library is not None
    n, x = x.numel(), x.float()
    packed = torch.empty((n + 7) // 8, dtype=_BYTE)
    sums = (ctypes.c_double * 2)()
    count = library.sl_sign_encode(x.data_ptr(), n, packed.data_ptr(), sums)
    if l1:
        return packed, torch.tensor([(sums[0] - sums[1]) / max(1, n)], dtype=torch.float32)
    means = [sums[0] / max(1, count), sums[1] / max(1, n - count)]
    return packed, torch.tensor(means, dtype=torch.float32)


def sign_decode(packed: Tensor, pos: Tensor, neg: Tensor, count: int, lengths: tuple[int, ...] | None) -> Tensor:
    """See `plain.sign_decode`; with lengths, one mean per tensor."""
    library = _compiled(count)
    out = torch.empty(count)
    for piece, target, p, q in _pieces(packed, out, 1, lengths, pos, neg):
        if library is None:
            target.copy_(plain.sign_decode(piece, p, q, target.numel()))
        else:
            library.sl_sign_decode(piece.data_ptr(), target.numel(), float(p), float(q), target.data_ptr())
    return out


def ternary_encode(x: Tensor, scale: Tensor, seed: int | None, lengths: tuple[int, ...] | None) -> Tensor:
    """Codes by threshold `scale`, or with a seed by chance |x| / scale; with lengths, one scale per tensor."""
    library = _compiled(x.numel())
    x = x.float()
    sizes = [x.numel()] if lengths is None else list(lengths)
    packed = torch.empty(sum((n + 3) // 4 for n in sizes), dtype=_BYTE)
    k0, k1 = rng.keys(0 if seed is None else seed)
    for target, piece, limit in _pieces(packed, x, 2, lengths, scale):
        if library is not None:
            where, to = piece.data_ptr(), target.data_ptr()
            library.sl_ternary_encode(where, piece.numel(), float(limit), seed is not None, k0, k1, to)
        elif seed is None:
            target.copy_(plain.ternary_encode(piece, limit))
        else:
            target.copy_(plain.terngrad_encode(piece, limit, seed))
    return packed


def terngrad(x: Tensor, clip: float, seed: int, lengths: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    """See `pieces.terngrad`."""
    parts = [x] if lengths is None else x.split(list(lengths))
    scale = torch.stack([pieces.clipped(moments(part), clip) for part in parts]) if parts else torch.empty(0)
    return ternary_encode(x, scale, seed, lengths), scale


def ternary_decode(packed: Tensor, scale: Tensor, count: int, lengths: tuple[int, ...] | None) -> Tensor:
    """See `plain.ternary_decode`; with lengths, one scale per tensor."""
    library = _compiled(count)
    out = torch.empty(count)
    for piece, target, s in _pieces(packed, out, 2, lengths, scale):
        if library is None:
            target.copy_(plain.ternary_decode(piece, s, target.numel()))
        else:
            library.sl_ternary_decode(piece.data_ptr(), target.numel(), float(s), target.data_ptr())
    return out


def sign_residual(
    x: Tensor, residual: Tensor | None, lengths: tuple[int, ...] | None, l1: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `pieces.sign_residual`."""
    whole = pieces.added(x, residual)
    packed, means = sign_encode(whole, lengths, l1)
    sent = sign_decode(packed, means[0], -means[0] if l1 else means[1], x.numel(), lengths)
    return packed, means, torch.sub(whole, sent, out=sent)


def ternary_residual(
    x: Tensor, residual: Tensor | None, scale: Tensor, seed: int | None, lengths: tuple[int, ...] | None
) -> tuple[Tensor, Tensor]:
    """See `pieces.ternary_residual`."""
    whole = pieces.added(x, residual)
    packed = ternary_encode(whole, scale, seed, lengths)
    sent = ternary_decode(packed, scale, x.numel(), lengths)
    return packed, torch.sub(whole, sent, out=sent)


def quantize_residual(
    x: Tensor, residual: Tensor | None, bits: int, block: int, seed: int | None, l2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `pieces.quantize_residual`."""
    n, library = x.numel(), _compiled_blocks(x.numel(), bits, block)
    if library is None:
        whole = pieces.added(x, residual)
        packed, scales = quantize_blocks(whole, bits, block, seed, l2)
        sent = dequantize_blocks(packed, scales, bits, block, n)
        return packed, scales, torch.sub(whole, sent, out=sent)
    x = x.float()
    packed = torch.empty((n * bits + 7) // 8, dtype=_BYTE)
    scales, rest = torch.empty(-(-n // block)), torch.empty(n)
    k0, k1 = rng.keys(0 if seed is None else seed)
    library.sl_quantize_residual(
        x.data_ptr(), None if residual is None else residual.data_ptr(), n, bits, block, seed is not None, l2, k0, k1,
        packed.data_ptr(), scales.data_ptr(), rest.data_ptr(),
    )  # fmt: skip
    return packed, scales, rest


def _pieces(
    packed: Tensor, values: Tensor, bits: int, lengths: tuple[int, ...] | None, *scales: Tensor
) -> list[tuple[Tensor, ...]]:
    """Each piece's packed bytes, its values and its scales."""
    if lengths is None:
        return [(packed, values, *(s.reshape(()) for s in scales))]
    sizes = [(n * bits + 7) // 8 for n in lengths]
    return list(zip(packed.split(sizes), values.split(list(lengths)), *scales, strict=True))


def moments(x: Tensor) -> Tensor:
    """See `plain.moments`."""
    x = x.float()
    if not x.numel():
        return torch.zeros(3)
    deviation, mean = torch.std_mean(x, unbiased=False)
    low, high = torch.aminmax(x)  # vectorised, which a norm is not
    return torch.stack([mean, deviation, torch.maximum(-low, high)])


def quantize_blocks(x: Tensor, bits: int, block: int, seed: int | None, l2: bool) -> tuple[Tensor, Tensor]:
    """See `plain.quantize_blocks`."""
    n, library = x.numel(), _compiled_blocks(x.numel(), bits, block)
    if library is None:
        chunked = _whole_bytes(bits, block) and n >= _SMALL and cpu_torch.CHUNK % block == 0
        quantize = cpu_torch.quantize_blocks if chunked else plain.quantize_blocks
        return quantize(x, bits, block, seed, l2)
    x = x.float()
    packed = torch.empty((n * bits + 7) // 8, dtype=_BYTE)
    scales = torch.empty(-(-n // block))
    k0, k1 = rng.keys(0 if seed is None else seed)
    library.sl_quantize(
        x.data_ptr(), n, bits, block, seed is not None, l2, k0, k1, packed.data_ptr(), scales.data_ptr()
    )
    return packed, scales


def dequantize_blocks(packed: Tensor, scales: Tensor, bits: int, block: int, count: int) -> Tensor:
    """See `plain.dequantize_blocks`."""
    library = _compiled(count) if _whole_bytes(bits, block) else None
    if library is None:
        return plain.dequantize_blocks(packed, scales, bits, block, count)
    out = torch.empty(count)
    library.sl_dequantize(packed.data_ptr(), scales.data_ptr(), count, bits, block, out.data_ptr())
    return out


def dequantize_onto(packed: Tensor, scales: Tensor, bits: int, block: int, total: Tensor, divisor: float) -> None:
    """See `pieces.dequantize_onto`."""
    count = total.numel()
    library = _compiled(count) if _whole_bytes(bits, block) else None
    if library is None or total.dtype != torch.float32 or not total.is_contiguous():
        total.add_(dequantize_blocks(packed, scales, bits, block, count))
        if divisor != 1:
            total.div_(divisor)
    else:
        where = packed.data_ptr(), scales.data_ptr()
        library.sl_dequantize_onto(*where, count, bits, block, divisor, total.data_ptr())


def _whole_bytes(bits: int, block: int) -> bool:
    """Whether every block of steps begins with a byte."""
    return bits in (4, 8) and block % 2 == 0


def _compiled_blocks(count: int, bits: int, block: int) -> ctypes.CDLL | None:
    return _compiled(count) if _whole_bytes(bits, block) and block <= _LARGEST_BLOCK else None


def natural_encode(x: Tensor, seed: int) -> Tensor:
    """See `plain.natural_encode`."""
    library = _compiled(x.numel())
    if library is None:
        return plain.natural_encode(x, seed)
    x, out = x.float(), torch.empty(x.numel(), dtype=_BYTE)
    k0, k1 = rng.keys(seed)
    library.sl_natural_encode(x.data_ptr(), x.numel(), plain.NATURAL_LOW, k0, k1, out.data_ptr())
    return out


def natural_decode(codes: Tensor) -> Tensor:
    """See `plain.natural_decode`."""
    library = _compiled(codes.numel())
    if library is None:
        return plain.natural_decode(codes)
    out = torch.empty(codes.numel())
    library.sl_natural_decode(codes.data_ptr(), codes.numel(), plain.NATURAL_LOW, out.data_ptr())
    return out


def compact(x: Tensor, threshold: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `sparse.compact`."""
    library = _compiled(x.numel())
    if library is None or x.dtype != torch.float32:
        return sparse.compact(x, threshold, capacity)
    values, indices = torch.zeros(capacity), torch.zeros(capacity, dtype=torch.int32)
    limit = int(threshold.view(torch.int32)) - 1 if bool(threshold > 0) else -1
    found = library.sl_compact(x.data_ptr(), x.numel(), limit, capacity, values.data_ptr(), indices.data_ptr())
    return values, indices, torch.tensor(found, dtype=torch.int32)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `sparse.topk`."""
    library = _compiled(x.numel())
    if library is None or x.dtype != torch.float32 or k == 0:
        return sparse.topk(x, k)
    values, indices = torch.empty(k), torch.empty(k, dtype=torch.int32)
    library.sl_topk(x.data_ptr(), x.numel(), k, values.data_ptr(), indices.data_ptr())
    return values, indices


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """See `plain.pack_bits`; 1 and 2 bits by one multiplication, 4 by shifts."""
    return cpu_torch.pack_bits(values, bits) if bits in (1, 2, 4) else plain.pack_bits(values, bits)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """See `plain.unpack_bits`; 1, 2 and 4 bits by a table of 256 words."""
    return cpu_torch.unpack_bits(packed, bits, count) if bits in (1, 2, 4) else plain.unpack_bits(packed, bits, count)
