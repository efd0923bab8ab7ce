"""Bytes of a cache entry: packing the activations of samples, their checksums, and hashes of weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

State = Tensor | tuple[Tensor, ...]
"""Activations between two layers: one tensor, or several (hidden states and a mask), the batch first."""

_WORD = 8
_ROW = 1 << 13
_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Layout:
    """Shapes and types of one sample's activations. An entry is their bytes in order, padded to whole words."""

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    single: bool

    @classmethod
    def of(cls, state: State) -> "Layout":
        """The layout of a batch of activations; `ValueError` where a tensor does not have the batch first."""
        tensors = tensors_of(state)
        if len({part.shape[0] if part.dim() else -1 for part in tensors}) != 1 or not tensors[0].dim():
            raise ValueError(f"the activations have the shapes {[tuple(part.shape) for part in tensors]}")
        return cls(tuple((tuple(part.shape[1:]), part.dtype) for part in tensors), isinstance(state, Tensor))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor of a sample."""
        return [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.parts]

    @property
    def bytes(self) -> int:
        """Bytes of an entry."""
        return max(_WORD, -(-sum(self.sizes) // _WORD) * _WORD)

    def pack(self, state: State) -> Tensor:
        """The entries of a batch: bytes on the state's device, [samples, bytes]."""
        flat = [_as_bytes(part.detach()) for part in tensors_of(state)]
        missing = self.bytes - sum(part.shape[1] for part in flat)
        if missing:
            flat.append(flat[0].new_zeros(len(flat[0]), missing))
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)

    def unpack(self, entries: Tensor, device: torch.device) -> State:
        """The activations of packed entries, on `device`."""
        moved = entries.to(device, non_blocking=True)
        pieces = moved.split([*self.sizes, self.bytes - sum(self.sizes)], dim=1)
        made = tuple(
            piece.contiguous().view(dtype).view(len(entries), *shape)
            for piece, (shape, dtype) in zip(pieces, self.parts, strict=False)
        )
        return made[0] if self.single else made


def tensors_of(state: State) -> tuple[Tensor, ...]:
    """The tensors of a state."""
    return (state,) if isinstance(state, Tensor) else state


def select(state: State, rows: Tensor) -> State:
    """The samples at `rows` of a batch."""
    chosen = tuple(part.index_select(0, rows.to(part.device)) for part in tensors_of(state))
    return chosen[0] if isinstance(state, Tensor) else chosen


def assemble(parts: Iterable[tuple[Tensor, State]], samples: int) -> State:
    """One batch from pieces (rows, state) that together cover all rows."""
    pieces = list(parts)
    (rows, first), *others = pieces
    if not others and len(rows) == samples:
        return first
    whole = tuple(part.new_empty(samples, *part.shape[1:]) for part in tensors_of(first))
    for rows, state in pieces:
        for target, part in zip(whole, tensors_of(state), strict=True):
            target.index_copy_(0, rows.to(target.device), part)
    return whole[0] if isinstance(first, Tensor) else whole


def equal_bits(a: State, b: State) -> bool:
    """Whether two states are the same bit for bit (NaN equals itself, 0.0 is not -0.0)."""
    pairs = zip(tensors_of(a), tensors_of(b), strict=True)
    return all(x.shape == y.shape and x.dtype == y.dtype and _same_bytes(x, y) for x, y in pairs)


def nearly_equal(a: State, b: State) -> bool:
    """Whether two states differ by rounding at most: kernels of other batch sizes add in another order."""
    return all(
        x.shape == y.shape
        and bool(torch.allclose(x.float(), y.float(), rtol=_rounding(y), atol=_rounding(y) * _scale(y)))
        for x, y in zip(tensors_of(a), tensors_of(b), strict=True)
    )


def _rounding(value: Tensor) -> float:
    """The largest relative difference that is taken for rounding: small only where all arithmetic is in 32 bits."""
    exact = value.dtype in (torch.float32, torch.float64) and value.device.type == "cpu"
    return 1e-4 if exact and not torch.is_autocast_enabled("cpu") else 1e-2


def checksums(entries: Tensor, keys: Tensor) -> Tensor:
    """A 64-bit checksum of each entry and of its key; a change of any one word is always noticed.

    It is a sum of the words times odd random numbers. Odd numbers have an inverse modulo 2**64, so a changed word
    changes the sum.
    """
    words = entries.view(torch.int64)
    return (words * _factors(words.shape[1])).sum(1) + keys


def mixed(*values: int | Tensor) -> Tensor:
    """A hash of integers, or of columns of them, as int64 (splitmix64)."""
    total: int | Tensor = 0
    for value in values:
        total = _mix(torch.as_tensor(total, dtype=torch.int64, device="cpu") * 31 + value)
    return torch.as_tensor(total, dtype=torch.int64, device="cpu")


def digest(tensors: Iterable[Tensor], *context: object) -> int:
    """A positive 63-bit hash of tensors' contents and of `context`, the same on every rank."""
    state = blake2b(digest_size=8)
    state.update(repr(context).encode())
    for tensor in tensors:
        flat = _as_bytes(tensor.detach().reshape(1, -1))
        # In rows, so that the factors of a large tensor need no memory of its size.
        rows = torch.nn.functional.pad(flat, (0, -flat.shape[1] % (_WORD * _ROW))).view(torch.int64).view(-1, _ROW)
        sums = (rows * _factors(_ROW).to(rows.device)).sum(1).cpu()
        total = int((sums * mixed(torch.arange(len(sums), device="cpu")).bitwise_or(1)).sum())
        state.update(repr((tuple(tensor.shape), str(tensor.dtype), total)).encode())
    return int.from_bytes(state.digest(), "little") & _MASK


def _as_bytes(part: Tensor) -> Tensor:
    return part.contiguous().reshape(len(part), -1).view(torch.uint8)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_as_bytes(a.reshape(1, -1)), _as_bytes(b.reshape(1, -1)))


def _scale(value: Tensor) -> float:
    return float(value.float().abs().amax()) if value.numel() else 0.0


def _mix(value: Tensor) -> Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * (factor - (1 << 64))
    return value ^ (value >> 31)


@lru_cache(maxsize=64)
def _factors(count: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(count)
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator, device="cpu") * 2 + 1
