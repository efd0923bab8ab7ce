"""What travels: a launch is one part of a unit, made of cells, and a cell is one run of a codec.

A unit's parameters are grouped for its codec (equal matrices stacked, small tensors end to end: one cell each); cells
of one launch share messages where their payloads add. A unit of several partitions is one long vector, cut; each piece
is a launch with one cell. State stays packed as the cell needs it and is taken apart by parameter name on demand.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from syncline import codecs
from syncline.codecs import Batch, Codec, Gather, Merge, Out, Request, Result
from syncline.codecs.build import LATE
from syncline.codecs.requests import answer, lower
from syncline.engine.launch.bf16_buffers import Rounded

SMALL = 16384
"""Values up to which tensors of one unit are sent end to end by codecs that work on flat tensors."""

States = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Where:
    """Who runs a codec, and when."""

    step: int
    rank: int
    world: int
    seed: int


class Cell:
    """A batch of whole parameters under one codec, with the state that it has committed."""

    def __init__(self, codec: Codec, batch: Batch) -> None:
        self.codec, self.batch, self.names = codec, batch, batch.names
        self.members = batch.members
        self.state: dict[str, Tensor] = {}

    def pack(self, grads: Sequence[Tensor]) -> Tensor:
        """The members' gradients as the codec takes them; `grads` are the whole unit's."""
        return self.batch.pack([grads[i] for i in self.members])

    def outputs(self, output: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(parameter's place in the unit, first value, values) of a result."""
        for member, tensor in zip(self.members, self.batch.unpack(output), strict=True):
            yield member, 0, tensor

    def dump(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """(parameter, key, first value, tensor) of the committed state."""
        for name, tensors in self.batch.unpack_state(self.state).items():
            for key, tensor in tensors.items():
                yield name, key, 0, tensor

    def load(self, states: States) -> None:
        """Take over state by parameter name; what another codec left, but for residuals, does not fit and is left."""
        known = _state_shapes(self.codec, self.batch.shape)
        mine = {name: dict(states[name]) for name in self.names if name in states}
        packed = self.batch.pack_state(mine) if mine else {}
        self.state = {k: t for k, t in packed.items() if k == "error" or known.get(k) == tuple(t.shape)}


class Slice(Cell):
    """Values `begin` to `end` of a unit laid end to end, for codecs of flat tensors."""

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
        self.count = end - begin

    def pack(self, grads: Sequence[Tensor]) -> Tensor:
        parts = [grads[i].reshape(-1)[a:b] for i, a, b in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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
        known = {"error", *_state_shapes(self.codec, (self.count,))}
        owners = [states.get(owner, {}) for owner in self._owners]
        keys = {k for state in owners for k, t in state.items() if k in known}
        self.state = {}
        for key in sorted(keys):
            example = next(state[key] for state in owners if key in state)
            parts = [
                state[key].reshape(-1)[a:b] if key in state else example.new_zeros(b - a)
                for state, (_, a, b) in zip(owners, self.pieces, strict=True)
            ]
            self.state[key] = torch.cat(parts)


def cells_of(
    codec: Codec, names: Sequence[str], shapes: Sequence[tuple[int, ...]], partitions: int
) -> list[list[Cell]]:
    """The cells of each launch of a unit; of fewer launches than `partitions` where there are fewer values."""
    total = sum(torch.Size(shape).numel() for shape in shapes)
    partitions = min(partitions, max(1, total))
    if partitions == 1:
        return [[Cell(codec, batch) for batch in codecs.batches(codec, names, shapes, small=SMALL)]]
    cuts = [total * k // partitions for k in range(partitions + 1)]
    return [[Slice(codec, names, shapes, k, (cuts[k], cuts[k + 1]))] for k in range(partitions)]


def rounds_of(cells: Sequence[Cell]) -> tuple[int, bool]:
    """How many communications a launch has, and whether that is so in every step."""
    counts = []
    for cell in cells:
        shape = cell.batch.shape if not isinstance(cell, Slice) else (cell.count,)
        counts += [[len(cell.codec.rounds(shape, step=step, packed=True)) for step in (0, 1, LATE, LATE + 1)]]
    by_step = [max(row) for row in zip(*counts, strict=True)]
    return max(by_step), min(by_step) == max(by_step)


class Course:
    """The cells of one launch in one backward pass: requests out, answers in, until every cell has its result."""

    def __init__(self, cells: Sequence[Cell], where: Where, *, rounded: Rounded | None = None) -> None:
        self.cells, self.where, self._rounded = cells, where, rounded
        self.results: list[Result | None] = [None] * len(cells)
        self._runs: list[Any] = []
        self._round = 0
        self._plan: list[tuple[list[int], list[Request]]] = []

    def start(self, grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> list[Request]:
        """The first requests; `states` are those to go on from, a cell each."""
        now: list[Request | Result] = []
        for cell, state in zip(self.cells, states, strict=True):
            packed = cell.pack(grads)
            if not cell.codec.feedback and "error" in state:
                # What another codec held back is paid with the next gradient.
                packed = packed + state["error"].view(packed.shape).to(packed.dtype)
                state = {key: tensor for key, tensor in state.items() if key != "error"}
            run = cell.codec.run(
                names=cell.names, step=self.where.step, rank=self.where.rank, world=self.where.world,
                seed=self.where.seed,
            )  # fmt: skip
            self._runs.append(run)
            now.append(run.start(packed, state))
        return self._sort(list(range(len(self.cells))), now)

    def resume(self, answers: Sequence[Any]) -> list[Request]:
        """The next requests, none when all is done."""
        given: dict[int, Any] = {}
        for (members, requests), got in zip(self._plan, answers, strict=True):
            given.update(zip(members, self._share_out(requests, got), strict=True))
        places = sorted(given)
        return self._sort(places, [self._runs[i].resume(given[i]) for i in places])

    def _sort(self, places: Sequence[int], now: Sequence[Request | Result]) -> list[Request]:
        waiting: list[tuple[int, Request]] = []
        for place, item in zip(places, now, strict=True):
            if isinstance(item, Result):
                self.results[place] = item
            else:
                waiting.append((place, self._spared(self.cells[place].codec, item)))
        self._plan = _fuse(waiting)
        self._round += 1
        return [self._together(requests, number) for number, (_, requests) in enumerate(self._plan)]

    def _together(self, requests: Sequence[Request], number: int) -> Request:
        merges = self._to_round(requests)
        if merges:
            assert self._rounded is not None
            return self._rounded.write(merges, self.where.world, key=(self._round, number))
        return _together(requests)

    def _share_out(self, requests: Sequence[Request], got: Any) -> list[Any]:
        merges = self._to_round(requests)
        if merges:
            assert self._rounded is not None
            return [answer(r, out) for r, out in zip(requests, self._rounded.read(merges, got.mean), strict=True)]
        return _share_out(requests, got)

    def _to_round(self, requests: Sequence[Request]) -> list[Merge]:
        """These as merges, if they are to be rounded into the launch's own message."""
        if self._rounded is None or any(isinstance(request, Gather) for request in requests):
            return []
        merges = [lower(request) for request in requests]
        return merges if all(self._rounded.takes(merge) for merge in merges) else []

    @staticmethod
    def _spared(codec: Codec, request: Request) -> Request:
        """Without feedback nobody asks what a rank's share came to, and the local gradient is not needed again."""
        if not isinstance(request, Merge) or codec.feedback or not request.coder.adds:
            return request
        return replace(request, own=False, scratch=codec.definition.name in ("none", "bf16") and codec.tail is None)


def _fuse(waiting: Sequence[tuple[int, Request]]) -> list[tuple[list[int], list[Request]]]:
    """Requests whose payloads add up and are written alike travel as one."""
    groups: dict[Any, list[tuple[int, Request]]] = {}
    for place, request in waiting:
        key: Any = place
        if not isinstance(request, Gather):
            merge = lower(request)
            if merge.coder.adds:
                key = ("adds", merge.coder, merge.mean, merge.tensor.dtype)
        groups.setdefault(key, []).append((place, request))
    return [([p for p, _ in group], [r for _, r in group]) for group in groups.values()]


def _together(requests: Sequence[Request]) -> Request:
    if len(requests) == 1:
        return requests[0]
    merges = [lower(request) for request in requests]
    first = merges[0]
    own = any(m.own for m in merges)
    return Merge(torch.cat([m.tensor for m in merges]), first.coder, first.seed, first.mean, own, not own)


def _share_out(requests: Sequence[Request], got: Any) -> list[Any]:
    if len(requests) == 1:
        return [got]
    tensors = [request.tensor for request in requests if not isinstance(request, Gather)]
    sizes = [tensor.numel() for tensor in tensors]
    means, owns = got.mean.view(-1).split(sizes), got.own.view(-1).split(sizes)
    return [answer(r, Out(mean, own)) for r, mean, own in zip(requests, means, owns, strict=True)]


def _state_shapes(codec: Codec, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the state that a codec keeps for a packed gradient, by a run on nothing."""
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
