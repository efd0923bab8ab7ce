"""The fused operators as `torch.library` ops, `torch.ops.syncline.*`: one schema, one implementation per device.

CUDA runs the Triton kernels, or the reference where Triton is missing; the CPU what `cpu` chooses. Each has a fake,
so that compiled graphs can hold it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.library import custom_op

from syncline.codecs.kernels import cpu, pieces
from syncline.codecs.kernels.segments import packed_bytes

_Lengths = Sequence[int] | None
F = TypeVar("F", bound=Callable[..., Any])


@cache
def _gpu() -> ModuleType:
    try:
        from syncline.codecs.kernels import gpu
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return pieces
    return gpu


def _on(x: Tensor) -> Any:
    """The module that serves this tensor's device."""
    kind = x.device.type
    return cpu if kind == "cpu" else _gpu() if kind == "cuda" else pieces


def _op(schema: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Declare `syncline::<name of the function>`, which changes none of its arguments."""

    def declare(function: F) -> F:
        name = f"syncline::{function.__name__}"
        op = custom_op(name, function, mutates_args=(), schema=schema)
        op.register_fake(fake)
        return cast(F, op)

    return declare


def _bytes(like: Tensor, size: int) -> Tensor:
    return like.new_empty((size,), dtype=torch.uint8)


def _floats(like: Tensor, *size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.float32)


def _tuple(lengths: _Lengths) -> tuple[int, ...] | None:
    return None if lengths is None else tuple(lengths)


def _size(n: int, bits: int, lengths: _Lengths = None) -> int:
    return (n * bits + 7) // 8 if lengths is None else packed_bytes(tuple(lengths), bits)


def _count(lengths: _Lengths) -> int:
    return 1 if lengths is None else len(lengths)


@_op(
    "(Tensor x, int[]? lengths, bool l1) -> (Tensor, Tensor)",
    lambda x, lengths, l1: (
        _bytes(x, _size(x.numel(), 1, lengths)),
        _floats(x, 1 if l1 else 2, _count(lengths)),
    ),
)
def sign_encode(x: Tensor, lengths: _Lengths, l1: bool) -> tuple[Tensor, Tensor]:
    """Packed signs, and means (sides, pieces)."""
    out: tuple[Tensor, Tensor] = _on(x).sign_encode(x, _tuple(lengths), l1)
    return out


@_op(
    "(Tensor packed, Tensor pos, Tensor neg, SymInt count, int[]? lengths) -> Tensor",
    lambda packed, pos, neg, count, lengths: _floats(packed, count),
)
def sign_decode(packed: Tensor, pos: Tensor, neg: Tensor, count: int, lengths: _Lengths) -> Tensor:
    """A mean for each bit."""
    out: Tensor = _on(packed).sign_decode(packed, pos, neg, count, _tuple(lengths))
    return out


@_op(
    "(Tensor x, Tensor scale, int? seed, int[]? lengths) -> Tensor",
    lambda x, scale, seed, lengths: _bytes(x, _size(x.numel(), 2, lengths)),
)
def ternary_encode(x: Tensor, scale: Tensor, seed: int | None, lengths: _Lengths) -> Tensor:
    """Two-bit codes by threshold, or by chance with a seed."""
    out: Tensor = _on(x).ternary_encode(x, scale, seed, _tuple(lengths))
    return out


@_op(
    "(Tensor packed, Tensor scale, SymInt count, int[]? lengths) -> Tensor",
    lambda packed, scale, count, lengths: _floats(packed, count),
)
def ternary_decode(packed: Tensor, scale: Tensor, count: int, lengths: _Lengths) -> Tensor:
    """The values of two-bit codes."""
    out: Tensor = _on(packed).ternary_decode(packed, scale, count, _tuple(lengths))
    return out


@_op(
    "(Tensor x, int bits, int block, int? seed, bool l2) -> (Tensor, Tensor)",
    lambda x, bits, block, seed, l2: (_bytes(x, _size(x.numel(), bits)), _floats(x, -(-x.numel() // block))),
)
def quantize_blocks(x: Tensor, bits: int, block: int, seed: int | None, l2: bool) -> tuple[Tensor, Tensor]:
    """Packed steps and one scale per block."""
    out: tuple[Tensor, Tensor] = _on(x).quantize_blocks(x, bits, block, seed, l2)
    return out


@_op(
    "(Tensor packed, Tensor scales, int bits, int block, SymInt count) -> Tensor",
    lambda packed, scales, bits, block, count: _floats(packed, count),
)
def dequantize_blocks(packed: Tensor, scales: Tensor, bits: int, block: int, count: int) -> Tensor:
    """The values of packed steps."""
    out: Tensor = _on(packed).dequantize_blocks(packed, scales, bits, block, count)
    return out


@_op("(Tensor x, int seed) -> Tensor", lambda x, seed: _bytes(x, x.numel()))
def natural_encode(x: Tensor, seed: int) -> Tensor:
    """A byte of sign and exponent for each value."""
    out: Tensor = _on(x).natural_encode(x, seed)
    return out


@_op("(Tensor codes) -> Tensor", lambda codes: _floats(codes, codes.numel()))
def natural_decode(codes: Tensor) -> Tensor:
    """The powers of two of the bytes."""
    out: Tensor = _on(codes).natural_decode(codes)
    return out


@_op(
    "(Tensor x, Tensor threshold, SymInt capacity) -> (Tensor, Tensor, Tensor)",
    lambda x, threshold, capacity: (
        x.new_empty((capacity,)),
        x.new_empty((capacity,), dtype=torch.int32),
        x.new_empty((), dtype=torch.int32),
    ),
)
def compact(x: Tensor, threshold: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Large values, where they are, and how many."""
    out: tuple[Tensor, Tensor, Tensor] = _on(x).compact(x, threshold, capacity)
    return out


@_op(
    "(Tensor x, SymInt k) -> (Tensor, Tensor)",
    lambda x, k: (x.new_empty((k,)), x.new_empty((k,), dtype=torch.int32)),
)
def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest and where they are."""
    out: tuple[Tensor, Tensor] = _on(x).topk(x, k)
    return out


@_op(
    "(Tensor x, float ratio, int seed, int samples) -> Tensor",
    lambda x, ratio, seed, samples: _floats(x),
)
def sampled_threshold(x: Tensor, ratio: float, seed: int, samples: int) -> Tensor:
    """The magnitude that about `ratio` of the values reach."""
    out: Tensor = _on(x).sampled_threshold(x, ratio, seed, samples)
    return out


@_op("(Tensor x) -> Tensor", lambda x: _floats(x, 3))
def moments(x: Tensor) -> Tensor:
    """Mean, standard deviation and largest magnitude."""
    out: Tensor = _on(x).moments(x)
    return out


@_op(
    "(Tensor x, float limit, ScalarType dtype) -> Tensor",
    lambda x, limit, dtype: x.new_empty((x.numel(),), dtype=dtype),
)
def saturate(x: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """Values within a limit, in another dtype."""
    out: Tensor = _on(x).saturate(x, limit, dtype)
    return out


@_op("(Tensor values, int bits) -> Tensor", lambda values, bits: _bytes(values, _size(values.numel(), bits)))
def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Values packed tight."""
    out: Tensor = _on(values).pack_bits(values, bits)
    return out


@_op(
    "(Tensor packed, int bits, SymInt count) -> Tensor",
    lambda packed, bits, count: _bytes(packed, count),
)
def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Packed values, a byte each."""
    out: Tensor = _on(packed).unpack_bits(packed, bits, count)
    return out
