"""Batches: the tensors of a launch as its codec takes them, with the codec state that belongs to them.

A unit's parameters are grouped for its codec: equal matrices are stacked, small tensors are laid end to end. Each group
is one batch, and a launch runs its codec once per batch. A unit of several partitions is one long vector that is cut
into pieces; each piece is a launch with one batch. Codec state stays packed and is split by parameter on demand.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from syncline import codecs
from syncline.codecs import Batch, Codec, Gather, Merge, Out, Result
from syncline.codecs.build import LATE
from syncline.codecs.state import Memory

SMALL = 16384
"""Tensors of a unit with up to this many values are laid end to end for codecs that work on flat tensors."""
STACK = 1 << 20
"""Equal matrices are stacked up to this many values: more would only need more memory for the product of factors."""

States = Mapping[str, Mapping[str, Tensor]]


class CodecBatch:
    """Whole parameters that a codec handles as one tensor, and the codec state committed for them."""

    def __init__(self, codec: Codec, batch: Batch) -> None:
        self.codec, self.shape, self._batch = codec, batch.shape, batch
        self.names, self.members, self.lengths = batch.names, batch.members, batch.lengths
        self.state: dict[str, Tensor] = {}

    def pack(self, grads: Sequence[Tensor]) -> Tensor:
        """The members' gradients as one tensor for the codec; `grads` are those of the whole unit."""
        return self._batch.pack([grads[i] for i in self.members])

    def pack_sum(self, grads: Sequence[Tensor], residual: Tensor, memory: Memory) -> Tensor:
        """`pack` plus the packed residual, in one pass over memory."""
        out = memory.empty(self.shape, residual.dtype)
        return self._batch.pack_sum([grads[i] for i in self.members], residual, out)

    def outputs(self, output: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """The codec's output by member: (index of the parameter in the unit, first value, values)."""
        for member, tensor in zip(self.members, self._batch.unpack(output), strict=True):
            yield member, 0, tensor

    def of_members(self, state: Tensor, places: Collection[int]) -> list[Tensor]:
        """Views of the parts of a packed state tensor that belong to these parameters of the unit."""
        if state.numel() == torch.Size(self.shape).numel():  # one value per value of the gradient
            return [values for place, _, values in self.outputs(state.view(self.shape)) if place in places]
        return [row for place, row in zip(self.members, state, strict=True) if place in places]

    def dump(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """The committed state by member: (parameter, key, first value, tensor)."""
        for name, tensors in self._batch.unpack_state(self.state).items():
            for key, tensor in tensors.items():
                yield name, key, 0, tensor

    def load(self, states: States) -> None:
        """Take state by parameter name. Residuals fit every codec; other state of another codec is ignored."""
        mine = {name: dict(states[name]) for name in self.names if name in states}
        packed = self._batch.pack_state(mine) if mine else {}
        known = _state_shapes(self.codec, self.shape) if packed else {}
        self.state = {k: t for k, t in packed.items() if k == "error" or known.get(k) == tuple(t.shape)}


class CodecSlice(CodecBatch):
    """Values `begin` to `end` of a unit that is laid end to end, for codecs of flat tensors."""

    def __init__(
        self, codec: Codec, names: Sequence[str], shapes: Sequence[tuple[int, ...]], part: int, bounds: tuple[int, int]
    ) -> None:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        starts = [0, *accumulate(sizes)]
        begin, end = bounds
        self.codec, self.state = codec, {}
        self.pieces = [
            (i, max(begin, starts[i]) - starts[i], min(end, starts[i + 1]) - starts[i])
            for i in range(len(sizes))
            if starts[i] < end and begin < starts[i + 1]
        ]
        self.members = tuple(i for i, _, _ in self.pieces)
        self._owners = [names[i] for i in self.members]
        self.names = tuple(f"{name}[{part}]" for name in self._owners)
        self.shape = (end - begin,)
        self.lengths = tuple(b - a for _, a, b in self.pieces) if len(self.pieces) > 1 else None

    def pack(self, grads: Sequence[Tensor]) -> Tensor:
        parts = [grads[i].reshape(-1)[a:b] for i, a, b in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pack_sum(self, grads: Sequence[Tensor], residual: Tensor, memory: Memory) -> Tensor:
        out = memory.empty(self.shape, residual.dtype)
        sizes = [b - a for _, a, b in self.pieces]
        for (i, a, b), other, into in zip(self.pieces, residual.split(sizes), out.split(sizes), strict=True):
            torch.add(grads[i].reshape(-1)[a:b], other, out=into)
        return out

    def outputs(self, output: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        values = output.view(-1).split([b - a for _, a, b in self.pieces])
        for (i, a, _), part in zip(self.pieces, values, strict=True):
            yield i, a, part

    def dump(self) -> Iterator[tuple[str, str, int, Tensor]]:
        for key, tensor in self.state.items():
            parts = tensor.reshape(-1).split([b - a for _, a, b in self.pieces])
            for owner, (_, a, _), part in zip(self._owners, self.pieces, parts, strict=True):
                yield owner, key, a, part

    def load(self, states: States) -> None:
        owners = [states.get(owner, {}) for owner in self._owners]
        known = {"error", *(_state_shapes(self.codec, self.shape) if any(owners) else ())}
        keys = {k for state in owners for k, t in state.items() if k in known}
        self.state = {}
        for key in sorted(keys):
            example = next(state[key] for state in owners if key in state)
            parts = [
                state[key].reshape(-1)[a:b] if key in state else example.new_zeros(b - a)
                for state, (_, a, b) in zip(owners, self.pieces, strict=True)
            ]
            self.state[key] = torch.cat(parts)


def launch_batches(
    codec: Codec, names: Sequence[str], shapes: Sequence[tuple[int, ...]], partitions: int
) -> list[list[CodecBatch]]:
    """The batches of every launch of a unit. There are fewer launches than `partitions` if there are fewer values."""
    total = sum(torch.Size(shape).numel() for shape in shapes)
    partitions = min(partitions, max(1, total))
    if partitions == 1:
        batches = codecs.batches(codec, names, shapes, small=SMALL)
        return [[CodecBatch(codec, part) for batch in batches for part in _stacks(batch)]]
    cuts = [total * k // partitions for k in range(partitions + 1)]
    return [[CodecSlice(codec, names, shapes, k, (cuts[k], cuts[k + 1]))] for k in range(partitions)]


def _stacks(batch: Batch) -> Iterator[Batch]:
    """The batch; a large stack of matrices in several parts, for one of which a matrix is large enough."""
    size = max(1, STACK // max(1, torch.Size(batch.shapes[0]).numel())) if batch.stacked else len(batch.members)
    for at in range(0, len(batch.members), size):
        part = slice(at, at + size)
        yield Batch(batch.members[part], batch.names[part], batch.shapes[part], batch.stacked)


def count_rounds(batches: Sequence[CodecBatch]) -> tuple[int, bool]:
    """The number of communication rounds of a launch (at most), and whether it is the same in every step."""
    counts = []
    for batch in batches:
        counts += [[len(batch.codec.rounds(batch.shape, step=step, packed=True)) for step in (0, 1, LATE, LATE + 1)]]
    by_step = [max(row) for row in zip(*counts, strict=True)]
    return max(by_step), min(by_step) == max(by_step)


def _state_shapes(codec: Codec, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the state that a codec keeps for a packed gradient, found by a run without data."""
    for device in ("meta", "cpu"):
        try:
            return _try_state_shapes(codec, torch.zeros(shape, device=device))
        except (NotImplementedError, RuntimeError, ValueError, TypeError):
            continue
    return {}


def _try_state_shapes(codec: Codec, grad: Tensor) -> dict[str, tuple[int, ...]]:
    run = codec.run(step=LATE, world=2)
    now = run.start(grad)
    while not isinstance(now, Result):
        if isinstance(now, Gather):
            now = run.resume([now.payload, now.payload])
        else:
            now = run.resume(Out(now.tensor, now.tensor) if isinstance(now, Merge) else now.tensor)
    return {key: tuple(tensor.shape) for key, tensor in now.state.items()}
