"""The fused operators as `torch.library` ops, `torch.ops.syncline.*`: one schema, one implementation per device.

CUDA runs the Triton kernels, or the reference where Triton is missing; the CPU what `cpu` chooses. Each has a fake,
so that compiled graphs can hold it. `ops.py` documents what every operator does.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op

from syncline.codecs.kernels import cpu, linalg, pieces, plain, sparse
from syncline.codecs.kernels.segments import packed_bytes

_Lengths = Sequence[int] | None
_None = Callable[..., None]
_One = Callable[..., Tensor]
_Two = Callable[..., tuple[Tensor, Tensor]]
_Three = Callable[..., tuple[Tensor, Tensor, Tensor]]


@cache
def _gpu() -> ModuleType:
    try:
        from syncline.codecs.kernels import gpu
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return pieces
    return gpu


def _op(name: str, schema: str, fake: Callable[..., Any], *, mutates: tuple[str, ...] = ()) -> Any:
    """Declare `syncline::<name>`: the function of that name in the module for the first argument's device."""

    @cache
    def implementation(kind: str) -> Callable[..., Any]:
        module = cpu if kind == "cpu" else _gpu() if kind == "cuda" else pieces
        # Where the device has no function of its own, the reference.
        places = (module, pieces, plain, sparse, linalg)
        function: Callable[..., Any] = next(getattr(one, name) for one in places if hasattr(one, name))
        return function

    def run(*args: Any) -> Any:
        return implementation(args[0].device.type)(*(tuple(a) if isinstance(a, list) else a for a in args))

    op = custom_op(f"syncline::{name}", run, mutates_args=mutates, schema=schema)
    op.register_fake(fake)

    def call(*args: Any) -> Any:
        # The dispatcher takes the host longer than the launch of a kernel: only a compiler needs it.
        real = type(args[0]) is Tensor and args[0].device.type in ("cpu", "cuda")
        return run(*args) if real and not torch.compiler.is_compiling() else op(*args)

    return call


def _bytes(like: Tensor, count: int, bits: int = 8, lengths: _Lengths = None) -> Tensor:
    """A payload of `count` values of `bits` bits; with lengths, each tensor starts on a byte."""
    size = (count * bits + 7) // 8 if lengths is None else packed_bytes(tuple(lengths), bits)
    return like.new_empty((size,), dtype=torch.uint8)


def _floats(like: Tensor, *size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.float32)


def _positions(like: Tensor, *size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.int32)


sign_encode = cast(_Two, _op(
    "sign_encode", "(Tensor x, int[]? lengths, bool l1) -> (Tensor, Tensor)",
    lambda x, lengths, l1: (
        _bytes(x, x.numel(), 1, lengths), _floats(x, 1 if l1 else 2, 1 if lengths is None else len(lengths)),
    ),
))  # fmt: skip
sign_residual = cast(_Three, _op(
    "sign_residual", "(Tensor x, Tensor? residual, int[]? lengths, bool l1) -> (Tensor, Tensor, Tensor)",
    lambda x, residual, lengths, l1: (
        _bytes(x, x.numel(), 1, lengths), _floats(x, 1 if l1 else 2, 1 if lengths is None else len(lengths)),
        _floats(x, x.numel()),
    ),
))  # fmt: skip
sign_decode = cast(_One, _op(
    "sign_decode", "(Tensor packed, Tensor pos, Tensor neg, SymInt count, int[]? lengths) -> Tensor",
    lambda packed, pos, neg, count, lengths: _floats(packed, count),
))  # fmt: skip
ternary_encode = cast(_One, _op(
    "ternary_encode", "(Tensor x, Tensor scale, int? seed, int[]? lengths) -> Tensor",
    lambda x, scale, seed, lengths: _bytes(x, x.numel(), 2, lengths),
))  # fmt: skip
terngrad = cast(_Two, _op(
    "terngrad", "(Tensor x, float clip, int seed, int[]? lengths) -> (Tensor, Tensor)",
    lambda x, clip, seed, lengths: (
        _bytes(x, x.numel(), 2, lengths), _floats(x, 1 if lengths is None else len(lengths)),
    ),
))  # fmt: skip
ternary_residual = cast(_Two, _op(
    "ternary_residual", "(Tensor x, Tensor? residual, Tensor scale, int? seed, int[]? lengths) -> (Tensor, Tensor)",
    lambda x, residual, scale, seed, lengths: (_bytes(x, x.numel(), 2, lengths), _floats(x, x.numel())),
))  # fmt: skip
ternary_decode = cast(_One, _op(
    "ternary_decode", "(Tensor packed, Tensor scale, SymInt count, int[]? lengths) -> Tensor",
    lambda packed, scale, count, lengths: _floats(packed, count),
))  # fmt: skip
quantize_blocks = cast(_Two, _op(
    "quantize_blocks", "(Tensor x, int bits, int block, int? seed, bool l2) -> (Tensor, Tensor)",
    lambda x, bits, block, seed, l2: (_bytes(x, x.numel(), bits), _floats(x, -(-x.numel() // block))),
))  # fmt: skip
quantize_residual = cast(_Three, _op(
    "quantize_residual",
    "(Tensor x, Tensor? residual, int bits, int block, int? seed, bool l2) -> (Tensor, Tensor, Tensor)",
    lambda x, residual, bits, block, seed, l2: (
        _bytes(x, x.numel(), bits), _floats(x, -(-x.numel() // block)), _floats(x, x.numel()),
    ),
))  # fmt: skip
dequantize_blocks = cast(_One, _op(
    "dequantize_blocks", "(Tensor packed, Tensor scales, int bits, int block, SymInt count) -> Tensor",
    lambda packed, scales, bits, block, count: _floats(packed, count),
))  # fmt: skip
natural_encode = cast(_One, _op(
    "natural_encode", "(Tensor x, int seed) -> Tensor", lambda x, seed: _bytes(x, x.numel()),
))  # fmt: skip
natural_decode = cast(_One, _op(
    "natural_decode", "(Tensor codes) -> Tensor", lambda codes: _floats(codes, codes.numel()),
))  # fmt: skip
compact = cast(_Three, _op(
    "compact", "(Tensor x, Tensor threshold, SymInt capacity) -> (Tensor, Tensor, Tensor)",
    lambda x, threshold, capacity: (x.new_empty((capacity,)), _positions(x, capacity), _positions(x)),
))  # fmt: skip
topk = cast(_Two, _op(
    "topk", "(Tensor x, SymInt k) -> (Tensor, Tensor)", lambda x, k: (x.new_empty((k,)), _positions(x, k)),
))  # fmt: skip
sampled_threshold = cast(_One, _op(
    "sampled_threshold", "(Tensor x, float ratio, int seed, int samples) -> Tensor",
    lambda x, ratio, seed, samples: _floats(x),
))  # fmt: skip
moments = cast(_One, _op("moments", "(Tensor x) -> Tensor", lambda x: _floats(x, 3)))
saturate = cast(_One, _op(
    "saturate", "(Tensor x, float limit, ScalarType dtype, float factor) -> Tensor",
    lambda x, limit, dtype, factor: x.new_empty((x.numel(),), dtype=dtype),
))  # fmt: skip
sign_onto = cast(_None, _op(
    "sign_onto", "(Tensor packed, Tensor pos, Tensor neg, int[]? lengths, Tensor(a!) total, float divisor) -> ()",
    lambda *_: None, mutates=("total",),
))  # fmt: skip
ternary_onto = cast(_None, _op(
    "ternary_onto", "(Tensor packed, Tensor scale, int[]? lengths, Tensor(a!) total, float divisor) -> ()",
    lambda *_: None, mutates=("total",),
))  # fmt: skip
dequantize_onto = cast(_None, _op(
    "dequantize_onto",
    "(Tensor packed, Tensor scales, int bits, int block, Tensor(a!) total, float divisor) -> ()",
    lambda *_: None, mutates=("total",),
))  # fmt: skip
natural_onto = cast(_None, _op(
    "natural_onto", "(Tensor codes, Tensor(a!) total, float divisor) -> ()", lambda *_: None, mutates=("total",),
))  # fmt: skip
scatter_unique = cast(_None, _op(
    "scatter_unique", "(Tensor(a!) out, Tensor indices, Tensor values) -> ()", lambda *_: None, mutates=("out",),
))  # fmt: skip
keep_if = cast(_None, _op(
    "keep_if", "(Tensor good, Tensor(a!) new, Tensor? old) -> ()", lambda good, new, old: None, mutates=("new",),
))  # fmt: skip
orthonormal = cast(_One, _op("orthonormal", "(Tensor m) -> Tensor", torch.empty_like))
unit_columns = cast(_One, _op(
    "unit_columns", "(Tensor factor, Tensor fresh) -> Tensor", lambda factor, fresh: torch.empty_like(fresh),
))  # fmt: skip
pack_bits = cast(_One, _op(
    "pack_bits", "(Tensor values, int bits) -> Tensor", lambda values, bits: _bytes(values, values.numel(), bits),
))  # fmt: skip
unpack_bits = cast(_One, _op(
    "unpack_bits", "(Tensor packed, int bits, SymInt count) -> Tensor",
    lambda packed, bits, count: _bytes(packed, count),
))  # fmt: skip
