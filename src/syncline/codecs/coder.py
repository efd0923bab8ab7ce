"""Coders: a pair of functions that encode a flat tensor as a payload and decode it; and how to compose them."""

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.wire import Layout, layout_of

Payload = tuple[Tensor, ...]


@dataclass(frozen=True)
class Coder:
    """Encoding of a flat float tensor. Equal coders give payloads of equal shapes for any data.

    `encoder(x, **options)` returns a tuple of tensors whose shapes depend on `x.numel()` alone;
    `decoder(payload, count, **options)` returns the flat tensor, or raises `ValueError`. Either may take `seed`, and
    each gets only those options that it has parameters for.
    `adds` promises one tensor in the payload, and that the sum of payloads decodes to the sum.
    """

    encoder: Callable[..., Payload]
    decoder: Callable[..., Tensor]
    options: tuple[tuple[str, Hashable], ...] = ()
    adds: bool = False

    def encode(self, x: Tensor, *, seed: int = 0) -> Payload:
        """The payload of a flat tensor."""
        return self.encoder(x, **self._options(self.encoder, seed))

    def decode(self, payload: Payload, count: int, *, seed: int = 0) -> Tensor:
        """The `count` values of a payload; `ValueError` if its shapes or dtypes are not this coder's."""
        if layout_of(payload) != self.layout(count):
            raise ValueError(f"not a payload of {count} values: {layout_of(payload)} instead of {self.layout(count)}")
        return self.decoder(payload, count, **self._options(self.decoder, seed))

    def layout(self, count: int) -> Layout:
        """Shapes and dtypes of the payload of `count` values, known without data: ranks never exchange sizes."""
        return _layout(self, count)

    def writes(self, dtype: torch.dtype) -> bool:
        """Whether this is `cast(dtype)`, which returns values of that dtype unchanged."""
        return self.encoder is _encode_cast and dict(self.options)["dtype"] == dtype

    @property
    def seeded(self) -> bool:
        """Whether the payload depends on the seed."""
        if self.encoder is _encode_both:
            return any(part.seeded for part in dict(self.options).values() if isinstance(part, Coder))
        return "seed" in _parameters(self.encoder) | _parameters(self.decoder)

    def _options(self, function: Callable[..., Any], seed: int) -> dict[str, Any]:
        takes = _parameters(function)
        return {name: value for name, value in (*self.options, ("seed", seed)) if name in takes}


def coder(
    encoder: Callable[..., Payload], decoder: Callable[..., Tensor], *, adds: bool = False, **options: Hashable
) -> Coder:
    """A `Coder` whose functions get `options` as keyword arguments."""
    return Coder(encoder, decoder, tuple(sorted(options.items())), adds)


def then(head: Coder, tail: Coder) -> Coder:
    """A coder that encodes with `head` and then encodes every float tensor of that payload with `tail`."""
    if head.encoder is _encode_cast:
        return tail
    return Coder(_encode_both, _decode_both, (("head", head), ("tail", tail)), head.adds and tail.adds)


def split(payload: Payload, tail: Coder, *, seed: int = 0) -> Payload:
    """The payload with every float tensor replaced by its encoding with `tail`."""
    out: list[Tensor] = []
    for part in payload:
        out += tail.encode(part.reshape(-1).float(), seed=seed) if part.dtype.is_floating_point else (part,)
    return tuple(out)


def join(parts: Payload, tail: Coder, layout: Layout, *, seed: int = 0) -> Payload:
    """Undo `split`; `layout` is the layout of the original payload."""
    out, at = [], 0
    for shape, dtype in layout:
        if not dtype.is_floating_point:
            out.append(parts[at])
            at += 1
            continue
        count = torch.Size(shape).numel()
        width = len(tail.layout(count))
        out.append(tail.decode(parts[at : at + width], count, seed=seed).to(dtype).reshape(shape))
        at += width
    return tuple(out)


def _encode_both(x: Tensor, *, head: Coder, tail: Coder, seed: int) -> Payload:
    return split(head.encode(x, seed=seed), tail, seed=seed)


def _decode_both(payload: Payload, count: int, *, head: Coder, tail: Coder, seed: int) -> Tensor:
    return head.decode(join(payload, tail, head.layout(count), seed=seed), count, seed=seed)


FP16_LIMIT = 65504.0 * (1 - 2**-6)


@lru_cache(maxsize=64)
def cast(dtype: torch.dtype) -> Coder:
    """The values converted to `dtype`. Where Syncline sums half-precision values itself, it sums in float32."""
    return coder(_encode_cast, _decode_cast, adds=True, dtype=dtype)


def _encode_cast(x: Tensor, *, dtype: torch.dtype) -> Payload:
    return (saturated(x, dtype) if dtype == torch.float16 else x.to(dtype),)


def saturated(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x clipped to float16's range, with room for rounding in a sum; inf and nan stay as they are."""
    return ops.saturate(x, limit=FP16_LIMIT, dtype=dtype or x.dtype)


def _decode_cast(payload: Payload, count: int, *, dtype: torch.dtype) -> Tensor:
    (x,) = payload
    return x.float() if dtype in (torch.float16, torch.bfloat16) else x


DENSE = cast(torch.float32)
"""Plain float32 values."""


@lru_cache(maxsize=65536)
def _layout(coder: Coder, count: int) -> Layout:
    # The meta device gives shapes without data; an operator that cannot run there gets real zeros.
    try:
        return layout_of(coder.encode(torch.empty(count, device="meta")))
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return layout_of(coder.encode(torch.zeros(count)))


@lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
