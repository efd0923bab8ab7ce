"""The operators on CUDA: a Triton kernel wherever there is one for the arguments, else the reference."""

import torch
from torch import Tensor

from syncline.codecs.kernels import (
    gpu_blocks,
    gpu_factors,
    gpu_sample,
    gpu_saturate,
    gpu_scatter,
    gpu_select,
    linalg,
    pieces,
    plain,
    sparse,
)
from syncline.codecs.kernels.gpu_keep import keep_if as keep_if
from syncline.codecs.kernels.gpu_moments import moments as moments
from syncline.codecs.kernels.gpu_random import natural_decode as natural_decode
from syncline.codecs.kernels.gpu_random import natural_encode as natural_encode
from syncline.codecs.kernels.gpu_random import natural_onto as natural_onto
from syncline.codecs.kernels.gpu_sign import sign_decode as sign_decode
from syncline.codecs.kernels.gpu_sign import sign_encode as sign_encode
from syncline.codecs.kernels.gpu_sign import sign_onto as sign_onto
from syncline.codecs.kernels.gpu_sign import sign_residual as sign_residual
from syncline.codecs.kernels.gpu_ternary import ternary_decode as ternary_decode
from syncline.codecs.kernels.gpu_ternary import ternary_encode as ternary_encode
from syncline.codecs.kernels.gpu_ternary import ternary_onto as ternary_onto
from syncline.codecs.kernels.gpu_ternary import ternary_residual as ternary_residual
from syncline.codecs.kernels.gpu_ternary import terngrad as terngrad

# From here finding the k-th key by counting beats torch's top-k. Below, its dozen launches cost the host more.
LARGE = 1 << 22


def quantize_blocks(x: Tensor, bits: int, block: int, seed: int | None, l2: bool) -> tuple[Tensor, Tensor]:
    """See `plain.quantize_blocks`."""
    if bits in (2, 4, 8) and block in gpu_blocks.BLOCKS:
        return gpu_blocks.quantize_blocks(x, bits, block, seed, l2)
    return plain.quantize_blocks(x, bits, block, seed, l2)


def quantize_residual(
    x: Tensor, residual: Tensor | None, bits: int, block: int, seed: int | None, l2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `pieces.quantize_residual`."""
    fits = bits in (2, 4, 8) and block in gpu_blocks.BLOCKS
    quantize = gpu_blocks.quantize_residual if fits else pieces.quantize_residual
    return quantize(x, residual, bits, block, seed, l2)


def dequantize_blocks(packed: Tensor, scales: Tensor, bits: int, block: int, count: int) -> Tensor:
    """See `plain.dequantize_blocks`."""
    if bits in (2, 4, 8) and block in gpu_blocks.BLOCKS:
        return gpu_blocks.dequantize_blocks(packed, scales, bits, block, count)
    return plain.dequantize_blocks(packed, scales, bits, block, count)


def dequantize_onto(packed: Tensor, scales: Tensor, bits: int, block: int, total: Tensor, divisor: float) -> None:
    """See `pieces.dequantize_onto`."""
    fits = bits in (2, 4, 8) and block in gpu_blocks.BLOCKS
    (gpu_blocks if fits else pieces).dequantize_onto(packed, scales, bits, block, total, divisor)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """See `plain.pack_bits`."""
    return gpu_blocks.pack_bits(values, bits) if bits in (1, 2, 4) else plain.pack_bits(values, bits)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """See `plain.unpack_bits`."""
    unpack = gpu_blocks.unpack_bits if bits in (1, 2, 4) else plain.unpack_bits
    return unpack(packed, bits, count)


def compact(x: Tensor, threshold: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `sparse.compact`."""
    # Keys are float32's; a float64 tensor would lose its order in them.
    select = sparse.compact if x.dtype == torch.float64 else gpu_select.compact
    return select(x, threshold, capacity)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `sparse.topk`."""
    large = x.numel() >= LARGE and x.dtype != torch.float64
    return gpu_select.topk(x, k) if large else sparse.topk(x, k)


def sampled_threshold(x: Tensor, ratio: float, seed: int, samples: int) -> Tensor:
    """See `sparse.sampled_threshold`."""
    fits = samples <= gpu_sample.LARGEST and x.dtype != torch.float64
    threshold = gpu_sample.sampled_threshold if fits else sparse.sampled_threshold
    return threshold(x, ratio, seed, samples)


def scatter_unique(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """See `sparse.scatter_unique`."""
    plain_floats = out.dtype == values.dtype == torch.float32 and out.is_contiguous()
    scatter = gpu_scatter.scatter_unique if plain_floats else sparse.scatter_unique
    scatter(out, indices.contiguous(), values.contiguous())


def orthonormal(m: Tensor) -> Tensor:
    """See `linalg.orthonormal`."""
    fits = m.dtype == torch.float32 and 0 < m.shape[-1] <= gpu_factors.WIDE and m.numel() > 0
    return gpu_factors.orthonormal(m) if fits else linalg.orthonormal(m)


def unit_columns(factor: Tensor, fresh: Tensor) -> Tensor:
    """See `linalg.unit_columns`."""
    fits = factor.dtype == fresh.dtype == torch.float32 and factor.shape == fresh.shape and factor.dim() == 3
    unit = gpu_factors.unit_columns if fits and factor.numel() else linalg.unit_columns
    return unit(factor, fresh)


def saturate(x: Tensor, limit: float, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """See `plain.saturate`."""
    clip = plain.saturate if torch.float64 in (x.dtype, dtype) else gpu_saturate.saturate
    return clip(x, limit, dtype, factor)
