"""Coders: a pair of functions that encode a flat tensor as a payload and decode it; and how to compose them."""

import inspect
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
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
    each gets only those options that it has parameters for. A decoder that takes `onto` and `divisor` returns
    (onto + values) / divisor in the memory of `onto`, if that is not None.
    `adds` promises one tensor in the payload, and that the sum of payloads decodes to the sum.
    `residual_encoder(x, residual, **options)`, if there is one, returns what `encode_residual` does in fewer passes.
    With an option `lengths`, x is several tensors of these lengths, concatenated: each has its own scales.
    """

    encoder: Callable[..., Payload]
    decoder: Callable[..., Tensor]
    options: tuple[tuple[str, Hashable], ...] = ()
    adds: bool = False
    residual_encoder: Callable[..., tuple[Payload, Tensor]] | None = None

    def encode(self, x: Tensor, *, seed: int = 0) -> Payload:
        """The payload of a flat tensor."""
        return self.encoder(x, **self._options(self.encoder, seed))

    def encode_residual(self, x: Tensor, residual: Tensor | None, *, seed: int = 0) -> tuple[Payload, Tensor]:
        """The payload of x + residual, and the new residual: what the payload does not say of that sum."""
        if self.residual_encoder is not None:
            return self.residual_encoder(x, residual, **self._options(self.residual_encoder, seed))
        whole = x if residual is None else x + residual
        payload = self.encode(whole, seed=seed)
        return payload, whole - self.decode(payload, whole.numel(), seed=seed)

    def decode_onto(
        self, total: Tensor | None, payload: Payload, count: int, *, divisor: int = 1, seed: int = 0
    ) -> Tensor:
        """(total + decoded values) / divisor, in the memory of `total`; None counts as zeros."""
        if "onto" in _parameters(self.decoder):
            self._check(payload, count)
            options = self._options(self.decoder, seed)
            return self.decoder(payload, count, onto=total, divisor=divisor, **options)
        part = self.decode(payload, count, seed=seed)
        if total is not None:
            total.add_(part)
        else:
            shares = any(part.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in payload)
            total = part.clone() if shares else part
        return total if divisor == 1 else total.div_(divisor)

    def decode(self, payload: Payload, count: int, *, seed: int = 0) -> Tensor:
        """The `count` values of a payload; `ValueError` if its shapes or dtypes are not this coder's."""
        self._check(payload, count)
        return self.decoder(payload, count, **self._options(self.decoder, seed))

    def _check(self, payload: Payload, count: int) -> None:
        if layout_of(payload) != self.layout(count):
            raise ValueError(f"not a payload of {count} values: {layout_of(payload)} instead of {self.layout(count)}")

    def layout(self, count: int) -> Layout:
        """Shapes and dtypes of the payload of `count` values, known without data: ranks never exchange sizes."""
        return _layout(self, count)

    def part(self, start: int, stop: int) -> "Coder":
        """The coder of values `start` to `stop` of what this one codes: the same, but for its `lengths`."""
        return _part(self, start, stop)

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
    encoder: Callable[..., Payload],
    decoder: Callable[..., Tensor],
    *,
    adds: bool = False,
    residual_encoder: Callable[..., tuple[Payload, Tensor]] | None = None,
    **options: Hashable,
) -> Coder:
    """A `Coder` whose functions get `options` as keyword arguments."""
    return Coder(encoder, decoder, tuple(sorted(options.items())), adds, residual_encoder)


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


LARGE = 1 << 24
"""Values from which on the device's time to convert a tensor matters more than the host's."""
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


def kernel_pays(x: Tensor) -> bool:
    """Whether our kernel converts a tensor faster than torch: twice as fast, but it takes the host longer to launch."""
    return x.device.type == "cuda" and x.numel() >= LARGE


def scaled(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """x * factor in `dtype`, clipped as in `saturated` if that is float16: on CUDA one pass over memory."""
    return ops.saturate(x, limit=FP16_LIMIT if dtype == torch.float16 else math.inf, dtype=dtype, factor=factor)


def _decode_cast(payload: Payload, count: int, *, dtype: torch.dtype) -> Tensor:
    (x,) = payload
    if dtype not in (torch.float16, torch.bfloat16):
        return x
    return scaled(x, 1.0, torch.float32) if kernel_pays(x) else x.float()


DENSE = cast(torch.float32)
"""Plain float32 values."""


@lru_cache(maxsize=65536)
def _layout(coder: Coder, count: int) -> Layout:
    # The meta device gives shapes without data; an operator that cannot run there gets real zeros.
    try:
        return layout_of(coder.encode(torch.empty(count, device="meta")))
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return layout_of(coder.encode(torch.zeros(count)))


@lru_cache(maxsize=4096)
def _part(coder: Coder, start: int, stop: int) -> Coder:
    options = dict(coder.options)
    for name, value in coder.options:
        if isinstance(value, Coder):  # of a chain; the last of it codes what the others send, whatever the lengths
            options[name] = value if name == "tail" else value.part(start, stop)
        elif name == "lengths" and value is not None:
            options[name] = _cut(value, start, stop)
    return replace(coder, options=tuple(sorted(options.items())))


def _cut(lengths: Any, start: int, stop: int) -> tuple[int, ...]:
    """The lengths of what lies between `start` and `stop` of concatenated tensors."""
    ends = list(accumulate(lengths))
    pieces = (min(end, stop) - max(end - length, start) for end, length in zip(ends, lengths, strict=True))
    return tuple(piece for piece in pieces if piece > 0)


@lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
