"""Batches: several tensors that a codec processes as one, with one launch and one message.

`batches` decides which tensors go together. A `Batch` packs and unpacks the gradients and states of its members.
Each member keeps its state under its own name, so a run can continue with another grouping.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.codecs.build import Codec
from syncline.codecs.state import Tensors


@dataclass(frozen=True)
class Batch:
    """Tensors processed as one. `stacked`: equal matrices in one (k, n, m) tensor; else all values concatenated."""

    members: tuple[int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the packed gradient."""
        if self.stacked:
            return len(self.shapes), *_matrix(self.shapes[0])
        return (sum(torch.Size(shape).numel() for shape in self.shapes),)

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """The members' sizes, where several are concatenated."""
        if self.stacked or len(self.shapes) == 1:
            return None
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The members' tensors, in order, as one tensor."""
        if self.stacked:
            rows = [t.reshape(_matrix(shape)) for t, shape in zip(tensors, self.shapes, strict=True)]
            return rows[0][None] if len(rows) == 1 else torch.stack(rows)
        flat = [t.reshape(-1) for t in tensors]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def pack_sum(self, tensors: Sequence[Tensor], packed: Tensor, out: Tensor) -> Tensor:
        """The members' tensors, in order, plus a packed tensor: in one pass over memory."""
        parts = zip(tensors, self.unpack(packed.view(self.shape)), self.unpack(out), strict=True)
        for tensor, other, into in parts:
            torch.add(tensor, other, out=into)
        return out

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Views of a packed tensor in the members' shapes."""
        if self.stacked:
            return [row.view(shape) for row, shape in zip(packed.unbind(0), self.shapes, strict=True)]
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        pieces = packed.view(-1).split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def pack_state(self, states: Mapping[str, Tensors]) -> dict[str, Tensor]:
        """The members' state tensors packed for the batch; a member without state starts from zeros."""
        mine = [states.get(name, {}) for name in self.names]
        keys = sorted({key for state in mine for key in state})
        packed = {}
        for key in keys:
            example = next(state[key] for state in mine if key in state)
            if self.stacked:
                if key == "error":  # as matrices: members may have different shapes
                    pairs = list(zip(mine, self.shapes, strict=True))
                    mine = [{**s, key: s[key].reshape(_matrix(shape))} if key in s else s for s, shape in pairs]
                    example = example.new_zeros(_matrix(self.shapes[0]))
                # Another codec or other options may have left a tensor of another shape.
                zeros = torch.zeros_like(example)
                parts = [s[key] if key in s and s[key].shape == example.shape else zeros for s in mine]
                packed[key] = parts[0][None] if len(parts) == 1 else torch.stack(parts)
            else:
                blank = [example.new_zeros(shape) for shape in self.shapes]
                parts = [s.get(key, zero).reshape(-1) for s, zero in zip(mine, blank, strict=True)]
                packed[key] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return packed

    def unpack_state(self, packed: Tensors) -> dict[str, dict[str, Tensor]]:
        """The batch's new state by member name, each in its own tensor."""
        out: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for key, tensor in packed.items():
            if self.stacked:
                parts = [row.reshape(s) if row.numel() == torch.Size(s).numel() and key == "error" else row
                         for row, s in zip(tensor.unbind(0), self.shapes, strict=True)]  # fmt: skip
            else:
                parts = self.unpack(tensor)
            for name, part in zip(self.names, parts, strict=True):
                out[name][key] = part if len(self.names) == 1 else part.clone()
        return out


def batches(codec: Codec, names: Sequence[str], shapes: Sequence[Sequence[int]], *, small: int = 0) -> list[Batch]:
    """Group tensors for one codec: equal matrices are stacked, tensors of up to `small` values are concatenated.

    For a matrix codec, stacking does not change the result; tensors that are not matrices are sent uncompressed,
    together. For a flat codec, concatenated tensors share what the codec shares within a tensor (top-k, blocks), unless
    it tells them apart by `state.lengths` (onebit, efsignsgd, tbq, terngrad: a scale for each).
    """
    stacks: dict[tuple[int, ...], list[int]] = {}
    pool: list[int] = []
    single: list[int] = []
    for index, shape in enumerate(shapes):
        if codec.view == "matrix" and len(shape) >= 2 and torch.Size(shape).numel():
            stacks.setdefault(_matrix(shape), []).append(index)
        elif codec.view == "matrix" or torch.Size(shape).numel() <= small:
            pool.append(index)
        else:
            single.append(index)
    groups = [(g, True) for g in stacks.values()] + [(pool, False)] * bool(pool) + [([i], False) for i in single]
    groups.sort(key=lambda group: group[0][0])
    return [
        Batch(tuple(g), tuple(names[i] for i in g), tuple(tuple(shapes[i]) for i in g), stacked)
        for g, stacked in groups
    ]


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], torch.Size(shape[1:]).numel()
