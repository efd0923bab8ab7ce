"""Tensor operators for codecs: quantise, pack bits, select large values, scatter, orthonormalise, random numbers.

All take and return tensors on the input's device, never block on a CUDA device, and give the same bits for the same
input and seed. Inputs may have any shape and float dtype and are read as flat float32. Operators with a `count`
return a flat tensor of that length. nan and inf are never lost: the values that they affect decode to nan.
Invalid payloads (wrong length, index out of range) raise `ValueError`; on CUDA, where a check would synchronise,
bad indices are ignored.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeGuard

import torch
from torch import Tensor

from syncline.codecs.kernels import library, rng, sparse


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` values of `bits` bits take."""
    return (count * bits + 7) // 8


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack uint8 values densely, the first in the lowest bits of the first byte; higher bits are dropped."""
    _check_bits(bits, 1)
    _check_bytes(values, values.numel())
    return library.pack_bits(values.contiguous(), bits)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` values that `pack_bits` packed, as uint8."""
    _check_bits(bits, 1)
    _check_bytes(packed, packed_size(_check_count(count), bits))
    return library.unpack_bits(packed.contiguous(), bits, count)


def quantize_blocks(
    x: Tensor, *, bits: int = 8, block: int = 256, seed: int | None = None, norm: str = "max"
) -> tuple[Tensor, Tensor]:
    """Signed `bits`-bit steps with one scale per block: (packed, scales), value = step * scale.

    The scale is the block's largest magnitude (`norm="max"`) or its Euclidean norm (`"l2"`) over
    2**(bits-1) - 1. Rounds to the nearest step, half to even; with a `seed`, up or down at random without bias.
    A block that holds nan or inf decodes to nan.
    """
    _check_bits(bits, 2)
    _check_block(block)
    _check_norm(norm)
    return library.quantize_blocks(_flat32(x), bits, block, None if seed is None else _signed(seed), norm == "l2")


def quantize_residual(
    x: Tensor, residual: Tensor | None, *, bits: int = 8, block: int = 256, seed: int | None = None, norm: str = "max"
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_blocks` of x + residual, and what it loses of that sum, in float32: (packed, scales, new residual)."""
    _check_bits(bits, 2)
    _check_block(block)
    _check_norm(norm)
    seed = None if seed is None else _signed(seed)
    return library.quantize_residual(_flat32(x), _residual(residual, x), bits, block, seed, norm == "l2")


def dequantize_blocks(
    packed: Tensor,
    scales: Tensor,
    *,
    bits: int = 8,
    block: int = 256,
    count: int,
    onto: Tensor | None = None,
    divisor: int = 1,
) -> Tensor:
    """The float32 values of a `quantize_blocks` result.

    With `onto`, as for all decoders: (onto + values) / divisor, in the memory of `onto`.
    """
    _check_bits(bits, 2)
    _check_block(block)
    _check_bytes(packed, packed_size(_check_count(count), bits))
    _check_floats(scales, -(-count // block), "scales")
    packed, scales = packed.contiguous(), _flat(scales).float()
    if _fused(onto, packed, count, on=("cpu", "cuda")):
        library.dequantize_onto(packed, scales, bits, block, onto, float(divisor))
        return onto
    return _onto(library.dequantize_blocks(packed, scales, bits, block, count), onto, divisor)


def qsgd_encode(x: Tensor, *, bits: int = 4, block: int = 512, seed: int) -> tuple[Tensor, Tensor]:
    """QSGD: stochastic levels of each block's Euclidean norm; 2**(bits-1) - 1 levels per sign."""
    return quantize_blocks(x, bits=bits, block=block, seed=seed, norm="l2")


def qsgd_decode(packed: Tensor, scales: Tensor, *, bits: int = 4, block: int = 512, count: int) -> Tensor:
    """The float32 values of a `qsgd_encode` result."""
    return dequantize_blocks(packed, scales, bits=bits, block=block, count=count)


def sign_encode(x: Tensor, *, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """One bit per value, set where x >= 0: (packed, mean of those, mean of the others); an empty side has mean 0.

    With `lengths`, x is several concatenated tensors (`concat`). The result equals encoding each of them: packed
    bytes concatenated and one mean per tensor, computed in one kernel launch.
    """
    packed, means = library.sign_encode(_flat32(x), _lengths(lengths, x.numel()), False)
    if lengths is None:
        return packed, means[0, 0], means[1, 0]
    return packed, means[0], means[1]


def sign_encode_l1(x: Tensor, *, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """One bit per value, set where x >= 0, and the mean magnitude; decode with `sign_decode(p, s, -s, count)`."""
    packed, means = library.sign_encode(_flat32(x), _lengths(lengths, x.numel()), True)
    return packed, means[0, 0] if lengths is None else means[0]


def sign_residual(
    x: Tensor, residual: Tensor | None, *, lengths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sign_encode` of x + residual, and what it loses of that sum: (packed, mean, mean, new residual)."""
    sizes = _lengths(lengths, x.numel())
    packed, means, rest = library.sign_residual(_flat32(x), _residual(residual, x), sizes, False)
    if lengths is None:
        return packed, means[0, 0], means[1, 0], rest
    return packed, means[0], means[1], rest


def sign_residual_l1(
    x: Tensor, residual: Tensor | None, *, lengths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`sign_encode_l1` of x + residual, and what it loses of that sum: (packed, mean magnitude, new residual)."""
    sizes = _lengths(lengths, x.numel())
    packed, means, rest = library.sign_residual(_flat32(x), _residual(residual, x), sizes, True)
    return packed, means[0, 0] if lengths is None else means[0], rest


def sign_decode(
    packed: Tensor,
    pos: Tensor,
    neg: Tensor,
    count: int,
    *,
    lengths: Sequence[int] | None = None,
    onto: Tensor | None = None,
    divisor: int = 1,
) -> Tensor:
    """`pos` where the bit is set and `neg` elsewhere, as float32; with `lengths`, one of each per tensor."""
    sizes = _check_pieces(packed, count, 1, lengths)
    high, low = _scales(pos, packed, lengths), _scales(neg, packed, lengths)
    packed = packed.contiguous()
    if _fused(onto, packed, count):
        library.sign_onto(packed, high, low, sizes, onto, float(divisor))
        return onto
    return _onto(library.sign_decode(packed, high, low, count, sizes), onto, divisor)


def abs_max(x: Tensor, *, lengths: Sequence[int] | None = None) -> Tensor:
    """The largest magnitude, float32, 0 for an empty tensor; nan if any is. With `lengths`, one per tensor."""
    x = _flat(x)
    pieces = [x] if lengths is None else x.split(_lengths(lengths, x.numel()))
    zero = x.new_zeros((), dtype=torch.float32)
    parts = [_largest(p) if p.numel() else zero for p in pieces]
    if lengths is None:
        return parts[0]
    return torch.stack(parts) if parts else zero.new_empty(0)


def finite(x: Tensor) -> Tensor:
    """Whether every value is finite, as a 0-d tensor: one pass, without blocking on the device."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    if x.device.type == "cpu":  # torch does not vectorise the norm there
        low, high = torch.aminmax(x)
        return low.isfinite() & high.isfinite()
    norm: Tensor = torch.linalg.vector_norm(x, torch.inf)
    return norm < torch.inf  # one kernel, where isfinite takes four


def keep_if(good: Tensor, new: Tensor, old: Tensor | None) -> Tensor:
    """`new` where the 0-d tensor `good` is true, else `old` in its shape, or zeros: the device decides.

    `new` may be overwritten, so that nothing is copied in the usual case.
    """
    kept = new.contiguous().view(-1)
    library.keep_if(good, kept, None if old is None else old.reshape(-1).to(kept.dtype))
    return kept.view(new.shape)


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population standard deviation and largest magnitude, in one pass over the tensor.

    Each is a 0-d float32, 0 for an empty tensor; values that are not finite make the deviation nan.
    """
    mean, deviation, largest = library.moments(_flat32(x)).unbind()
    return mean, deviation, largest


def saturate(x: Tensor, *, limit: float, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """x clipped to +-limit, times `factor`, converted to `dtype`, in its shape; inf and nan stay as they are."""
    return library.saturate(_flat(x), limit, dtype, factor).view(x.shape)


def ternary_encode(x: Tensor, *, threshold: float | Tensor) -> Tensor:
    """Two bits per value: 1 where x > threshold, 3 (that is -1) where x < -threshold, 2 for nan and inf, else 0."""
    return library.ternary_encode(_flat32(x), _scales(threshold, x, None), None, None)


def ternary_residual(x: Tensor, residual: Tensor | None, *, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """`ternary_encode` of x + residual, and what it loses of that sum: (packed, new residual)."""
    limit = _scales(threshold, x, None)
    return library.ternary_residual(_flat32(x), _residual(residual, x), limit, None, None)


def ternary_relative(
    x: Tensor, residual: Tensor | None, *, tau: float, lengths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`ternary_residual` with the threshold `tau` times the mean magnitude of x + residual: (packed, threshold, rest).

    With `lengths`, there is one threshold per tensor, and the codes of each tensor start on a byte.
    """
    sizes = _lengths(lengths, x.numel())
    error = _residual(residual, x)
    whole = _flat32(x).float() if error is None else _flat32(x) + error
    # The mean magnitudes of many tensors in one launch; the signs that come with them are not needed.
    threshold = tau * library.sign_encode(whole, sizes, True)[1][0]
    threshold = threshold[0] if lengths is None else threshold
    packed, rest = library.ternary_residual(whole, None, threshold, None, sizes)
    return packed, threshold, rest


def terngrad_encode(x: Tensor, *, scale: float | Tensor, seed: int, lengths: Sequence[int] | None = None) -> Tensor:
    """Two bits per value, as in `ternary_encode`: the sign with probability |x| / scale (`abs_max(x)`), else 0.

    With `lengths`, `scale` holds one number per tensor, and the codes of each tensor start on a byte.
    """
    sizes = _lengths(lengths, x.numel())
    return library.ternary_encode(_flat32(x), _scales(scale, x, lengths), _signed(seed), sizes)


def terngrad(x: Tensor, *, clip: float, seed: int, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """`terngrad_encode` with its scale: the largest magnitude, at most `clip` standard deviations (0: no clipping).

    Returns (packed, scale), the scale 0-d; with `lengths`, one per tensor.
    """
    packed, scale = library.terngrad(_flat32(x), float(clip), _signed(seed), _lengths(lengths, x.numel()))
    return packed, scale[0] if lengths is None else scale


def ternary_decode(
    packed: Tensor,
    scale: float | Tensor,
    count: int,
    *,
    lengths: Sequence[int] | None = None,
    onto: Tensor | None = None,
    divisor: int = 1,
) -> Tensor:
    """0, scale, -scale or nan for codes 0, 1, 3 and 2, as float32; with `lengths`, one scale per tensor."""
    sizes = _check_pieces(packed, count, 2, lengths)
    packed, scales = packed.contiguous(), _scales(scale, packed, lengths)
    if _fused(onto, packed, count):
        library.ternary_onto(packed, scales, sizes, onto, float(divisor))
        return onto
    return _onto(library.ternary_decode(packed, scales, count, sizes), onto, divisor)


def natural_encode(x: Tensor, *, seed: int) -> Tensor:
    """One byte per value: its sign and a neighbouring power of two, rounded up or down at random without bias.

    The range is 2**-75 to 2**50; smaller values become zero, larger ones the largest.
    """
    return library.natural_encode(_flat32(x), _signed(seed))


def natural_decode(codes: Tensor, count: int, *, onto: Tensor | None = None, divisor: int = 1) -> Tensor:
    """The float32 powers of two of `natural_encode`."""
    _check_bytes(codes, _check_count(count))
    codes = codes.contiguous()
    if _fused(onto, codes, codes.numel()):
        library.natural_onto(codes, onto, float(divisor))
        return onto
    return _onto(library.natural_decode(codes), onto, divisor)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k values of largest magnitude, exactly, and their int32 positions, in the order of position."""
    x = _flat(x)
    if not 0 <= k <= x.numel():
        raise ValueError(f"k is {k}: use 0 to {x.numel()}, the number of values")
    _check_positions(x)
    return library.topk(x, k)


def sampled_threshold(x: Tensor, *, ratio: float, seed: int, samples: int = 8192) -> Tensor:
    """A 0-d estimate of the magnitude that a share `ratio` of the values reaches, from `samples` of them."""
    x = _flat(x)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}: use a number above 0 and up to 1")
    if samples < 1:
        raise ValueError(f"samples is {samples}: use 1 or more")
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    return library.sampled_threshold(x, ratio, _signed(seed), samples)


def compact(x: Tensor, *, threshold: float | Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """The values whose magnitude is not below the threshold: (values, int32 positions, 0-d int32 count).

    The lists always have `capacity` entries, ordered by position. If more values qualify, the first ones are kept.
    Unused entries hold value 0 at position 0, so scattering all entries is correct. nan is kept.
    """
    x = _flat(x)
    if not 0 <= capacity < 1 << 31:
        raise ValueError(f"capacity is {capacity}: use 0 to 2**31 - 1")
    _check_positions(x)
    return library.compact(x, _scales(threshold, x, None), capacity)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, *, unique: bool = False) -> Tensor:
    """out[indices] += values, in place and returned; `out` flat. Repeated positions add up in a fixed order.

    `unique=True` promises that no position with a non-zero value repeats, which is faster on CUDA.
    """
    if out.dim() != 1 or indices.dim() != 1 or indices.shape != values.shape:
        shapes = f"out {tuple(out.shape)}, indices {tuple(indices.shape)}, values {tuple(values.shape)}"
        raise ValueError(f"{shapes}: all must be flat, with as many indices as values")
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices are {indices.dtype}: use int32 or int64")
    if unique and out.device.type == "cuda":
        library.scatter_unique(out, indices, values)
        return out
    return sparse.scatter_add(out, indices, values, unique)


def densify(
    values: Tensor,
    indices: Tensor,
    count: int,
    *,
    unique: bool = True,
    onto: Tensor | None = None,
    divisor: int = 1,
) -> Tensor:
    """A flat tensor of `count` zeros with the values added at their positions: decodes `topk` and `compact`."""
    if onto is None:
        onto = torch.zeros(_check_count(count), dtype=values.dtype, device=values.device)
    total = scatter_add(onto, indices, values, unique=unique)
    return total if divisor == 1 else total.div_(divisor)


def orthonormal(m: Tensor) -> Tensor:
    """Orthonormal columns that span those of m, shape (..., n, r), for any rank; surplus columns become zero.

    A column that repeats the others only up to rounding counts as new: it becomes some orthonormal direction, the
    same on every rank with the same input.
    """
    if m.dim() < 2:
        raise ValueError(f"a matrix (..., n, r) is needed, not shape {tuple(m.shape)}")
    return library.orthonormal(m)


THIN_FROM = 1 << 15
"""Values of a matrix from which another memory layout of its factor pays on a CPU. It may round otherwise."""


def thin_product(m: Tensor, factor: Tensor) -> Tensor:
    """m @ factor, (..., n, k) and (..., k, r) with few columns r; m may be a transposed view.

    A CPU multiplies several times faster with the factor's columns, or the product's, end to end in memory.
    """
    if m.device.type != "cpu" or m.shape[-2] * m.shape[-1] < THIN_FROM:
        return m @ factor
    if m.is_contiguous():
        return m @ factor.mT.contiguous().mT
    return (factor.mT @ m.mT).mT.contiguous()


def unit_columns(factor: Tensor, fresh: Tensor) -> Tensor:
    """The factor (..., n, r) with columns of norm 1; columns of zeros are replaced by those of `fresh`."""
    if factor.shape != fresh.shape:
        raise ValueError(f"factors of shapes {tuple(factor.shape)} and {tuple(fresh.shape)}: they must agree")
    return library.unit_columns(factor, fresh)


def uniform(n: int | Sequence[int], *, seed: int, offset: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Float32 numbers in [0, 1): number i depends on seed and offset + i alone, not on the device."""
    shape = (n,) if isinstance(n, int) else tuple(n)
    count = torch.Size(shape).numel()
    return rng.uniform(_check_count(count), seed=seed, offset=offset, device=device).view(shape)


def random_bits(n: int, *, seed: int, offset: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Random int32, all 32 bits, counted as in `uniform`."""
    return rng.random_bits(_check_count(n), seed=seed, offset=offset, device=device)


def concat(tensors: Sequence[Tensor]) -> Tensor:
    """All values of the tensors concatenated: one flat tensor, so that one kernel launch processes many."""
    if not tensors:
        raise ValueError("concat needs at least one tensor")
    return torch.cat([t.reshape(-1) for t in tensors])


def extract(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a flat tensor in the given shapes, in order: undoes `concat`."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if flat.dim() != 1 or sum(sizes) != flat.numel():
        raise ValueError(f"shapes hold {sum(sizes)} values and the tensor has shape {tuple(flat.shape)}: they must fit")
    return [piece.view(tuple(shape)) for piece, shape in zip(flat.split(sizes), shapes, strict=True)]


def _fused(onto: Tensor | None, payload: Tensor, count: int, *, on: Sequence[str] = ("cuda",)) -> TypeGuard[Tensor]:
    """Whether the decoded values are to be added `onto` a tensor, on a device with a kernel that does so."""
    if onto is not None and (onto.shape != (count,) or onto.device != payload.device):
        found = f"shape {tuple(onto.shape)} on {onto.device}"
        raise ValueError(f"onto has {found}: give a tensor of shape ({count},) on {payload.device}")
    return onto is not None and payload.device.type in on


def _onto(part: Tensor, onto: Tensor | None, divisor: int) -> Tensor:
    total = part if onto is None else onto.add_(part)
    return total if divisor == 1 else total.div_(divisor)


def _flat(x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point:
        raise ValueError(f"a float tensor is needed, not {x.dtype}")
    return x.detach().reshape(-1).contiguous()


def _flat32(x: Tensor) -> Tensor:
    flat = _flat(x)
    return flat if flat.dtype in (torch.float32, torch.float16, torch.bfloat16) else flat.float()


def _residual(residual: Tensor | None, x: Tensor) -> Tensor | None:
    if residual is None:
        return None
    if residual.numel() != x.numel():
        raise ValueError(f"the residual has {residual.numel()} values and the tensor {x.numel()}: they must agree")
    return _flat(residual).float()


def _largest(x: Tensor) -> Tensor:
    if x.device.type == "cpu":  # torch does not vectorise the norm there
        low, high = torch.aminmax(x)
        return torch.maximum(-low, high).float()
    norm: Tensor = torch.linalg.vector_norm(x, torch.inf)
    return norm.float()


def _signed(seed: int) -> int:
    """The seed as the signed 64-bit integer that an op's schema can carry; the numbers drawn are the same."""
    return ((seed + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _lengths(lengths: Sequence[int] | None, count: int) -> list[int] | None:
    if lengths is None:
        return None
    if sum(lengths) != count or any(n < 0 for n in lengths):
        raise ValueError(f"lengths add up to {sum(lengths)} and there are {count} values: they must agree")
    return list(lengths)


def _scales(value: float | Tensor, like: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """One float32 for the tensor (0-d), or one per concatenated tensor (flat)."""
    if not isinstance(value, Tensor):
        value = _number(float(value), like.device)
    _check_floats(value, 1 if lengths is None else len(lengths), "scale")
    value = value.detach().to(like.device, torch.float32)
    return value.reshape(()) if lengths is None else value.reshape(-1).contiguous()


def _number(value: float, device: torch.device) -> Tensor:
    """A 0-d float32 on the device."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.full((), value, dtype=torch.float32, device=device)
    return _kept_number(value, device)


@lru_cache(maxsize=256)
def _kept_number(value: float, device: torch.device) -> Tensor:
    # This copy is complete on return, so any stream may read the number.
    return torch.tensor(value, dtype=torch.float32).to(device)


def _check_pieces(packed: Tensor, count: int, bits: int, lengths: Sequence[int] | None) -> list[int] | None:
    sizes = _lengths(lengths, _check_count(count))
    _check_bytes(packed, sum(packed_size(n, bits) for n in ([count] if sizes is None else sizes)))
    return sizes


def _check_positions(x: Tensor) -> None:
    if x.numel() >= 1 << 31:
        raise ValueError(f"{x.numel()} values: positions are int32, so split the tensor below 2**31")


def _check_bits(bits: int, low: int) -> None:
    if not low <= bits <= 8:
        raise ValueError(f"bits is {bits}: use {low} to 8")


def _check_block(block: int) -> None:
    if block < 1:
        raise ValueError(f"block is {block}: use 1 or more")


def _check_norm(norm: str) -> None:
    if norm not in ("max", "l2"):
        raise ValueError(f"norm is '{norm}': use 'max' or 'l2'")


def _check_count(count: int) -> int:
    if count < 0:
        raise ValueError(f"count is {count}: it cannot be negative")
    return count


def _check_bytes(payload: Tensor, size: int) -> None:
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != size:
        raise ValueError(
            f"a flat uint8 tensor of {size} bytes is needed, not {payload.dtype} of shape {tuple(payload.shape)}"
        )


def _check_floats(values: Tensor, size: int, what: str) -> None:
    if not values.dtype.is_floating_point or values.numel() != size:
        raise ValueError(f"{what}: {size} float values are needed, not {values.dtype} of shape {tuple(values.shape)}")
