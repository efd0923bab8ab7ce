"""Build an `Exchange` from a spec, check which codecs it can carry, and count the bytes it sends."""

import inspect
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from syncline import spec
from syncline.codecs import Codec, Coder, Gather, Merge, Request
from syncline.codecs.build import LATE, Round
from syncline.codecs.build import build as build_codec
from syncline.codecs.coder import Payload
from syncline.codecs.requests import answer, lower
from syncline.codecs.wire import layout_of, nbytes, pack, unpack
from syncline.errors import UsageError
from syncline.exchange.definition import EXCHANGES, Definition
from syncline.exchange.moves import AllGather, AllReduce, Move, Op, Position


@dataclass(frozen=True)
class Exchange:
    """An exchange with its options, ready to be linked to a process group."""

    definition: Definition
    options: tuple[tuple[str, Any], ...]
    text: str

    def __str__(self) -> str:
        return self.text

    def workers(self, world: int) -> int:
        """How many ranks (the first ones) have gradients."""
        workers = self.definition.workers
        return workers(world, **dict(self.options)) if workers else world

    def serves(self, round: Round) -> bool:
        """Whether this exchange can carry a codec's communication."""
        if round.kind == "gather":
            return self.definition.gather is not None
        return round.adds or not self.definition.adds_only

    def moves(self, request: Request, position: Position) -> Generator[Op, Any, Any]:
        """The generator that carries one request on one rank; it returns the answer for the codec."""
        if isinstance(request, Gather):
            if self.definition.gather is None:
                raise UsageError(f"exchange '{self}' cannot gather: use {', '.join(gathering())}")
            layout = layout_of(request.payload)
            buffers = yield from self.definition.gather(pack(request.payload), position)
            return [unpack(buffer, layout) for buffer in buffers]
        merge = lower(request)
        if self.definition.adds_only and not merge.coder.adds:
            raise UsageError(f"exchange '{self}' adds payloads, and these cannot be added: use allgather")
        out = yield from self.definition.merge(merge, position, **dict(self.options))
        return answer(request, out)

    def sent_bytes(self, round: Round, world: int) -> list[int]:
        """Bytes that each rank sends for one communication of a codec."""
        return [sum(sent) for sent in _sent(self, round.kind, round.count, round.coder, world, 1)]

    def node_bytes(self, round: Round, world: int, node: int) -> tuple[int, int]:
        """Bytes that the busiest node of `node` ranks sends to other nodes, and the busiest rank inside its node."""
        sent = _sent(self, round.kind, round.count, round.coder, world, node)
        totals = [sum(between for between, _ in sent[first : first + node]) for first in range(0, world, node)]
        return max(totals), max(inside for _, inside in sent)


def available() -> list[str]:
    """The names of all exchanges, those of installed packages included."""
    return EXCHANGES.names()


def build(text: str | Exchange) -> Exchange:
    """The exchange that a spec describes: `"ring"`, `"server(servers=2)"`, `"hierarchical(node=4)"`."""
    if isinstance(text, Exchange):
        return text
    call = spec.parse_one(text)
    definition = EXCHANGES.get(call.name)
    options = spec.options(call, definition.merge, lead=2)
    return Exchange(definition, tuple(sorted(options.items())), str(call))


def legal(codec: str | Codec) -> list[str]:
    """The exchanges that can carry every communication of a codec; the first is a good default."""
    rounds = _all_rounds(build_codec(codec))
    names = [n for n in EXCHANGES.names() if all(Exchange(EXCHANGES.get(n), (), n).serves(r) for r in rounds)]
    first = ("allreduce", "allgather")
    return sorted(names, key=lambda n: (first.index(n) if n in first else len(first), n))


def check(codec: str | Codec, exchange: str | Exchange) -> Exchange:
    """The exchange, if it can carry the codec; else a `UsageError` that lists the legal choices."""
    built, carrier = build_codec(codec), build(exchange)
    for round in _all_rounds(built):
        if not carrier.serves(round):
            needs = "every rank's payload unchanged" if round.kind == "gather" else "its payloads decoded and merged"
            does = "adds payloads" if carrier.definition.adds_only else "merges payloads on the way"
            raise UsageError(
                f"codec '{built}' needs {needs} and exchange '{carrier}' {does}: with this codec use "
                f"{', '.join(legal(built))}"
            )
    return carrier


def gathering() -> list[str]:
    """The exchanges that can serve a `Gather`."""
    return [name for name in EXCHANGES.names() if EXCHANGES.get(name).gather]


def resolved(text: str, *, node: int) -> str:
    """The spec with the ranks per node filled in, where an exchange takes them and the spec leaves them out."""
    call, built = spec.parse_one(text), build(text)
    takes = "node" in inspect.signature(built.definition.merge).parameters
    if not takes or "node" in dict(built.options):
        return text
    return str(replace(call, kwargs={"node": node, **call.kwargs}))


def op_bytes(op: Op, world: int) -> int:
    """Bytes that a rank sends for one move; an all-reduce is counted as a ring."""
    if isinstance(op, AllReduce):
        size = op.tensor.numel() * op.tensor.element_size()
        return 2 * (world - 1) * size // world
    if isinstance(op, AllGather):
        return (world - 1) * op.buffer.numel()
    return sum(buffer.numel() for buffer in op.sends.values())


def _all_rounds(codec: Codec) -> list[Round]:
    steps = (0, 1, LATE, LATE + 1)
    return [r for shape in ((64, 64), (64,)) for step in steps for r in codec.rounds(shape, step=step)]


@lru_cache(maxsize=16384)
def _sent(
    exchange: Exchange, kind: str, count: int, coder: Coder | None, world: int, node: int
) -> tuple[tuple[int, int], ...]:
    """For each rank, the bytes that it sends to ranks of other nodes, and to ranks of its own node."""
    request: Request
    if coder is None:
        request = Gather((torch.empty(count, dtype=torch.uint8, device="meta"),))
    else:
        sizes = Coder(_blank_encode, _blank_decode, (("of", coder),), coder.adds)
        request = Merge(torch.empty(count, device="meta"), sizes)
    workers = exchange.workers(world)
    return tuple(_count(exchange.moves(request, Position(r, world, workers)), r, world, node) for r in range(world))


def _count(moves: Generator[Op, Any, Any], rank: int, world: int, node: int) -> tuple[int, int]:
    """Run one rank's moves with blank answers, and count the bytes it sends between nodes and inside its own."""
    between, inside, got = 0, 0, None
    while True:
        try:
            op = moves.send(got)
        except StopIteration:
            return between, inside
        # A backend's collective is counted as a ring, which sends to the next rank only.
        right = (rank + 1) % world
        sends = {r: b.numel() for r, b in op.sends.items()} if isinstance(op, Move) else {right: op_bytes(op, world)}
        away = sum(size for peer, size in sends.items() if peer // node != rank // node)
        between, inside = between + away, inside + sum(sends.values()) - away
        got = blank(op, world)


def blank(op: Op, world: int) -> Tensor | list[Tensor] | Mapping[int, Tensor]:
    """An answer of the right shape without data."""
    if isinstance(op, AllReduce):
        return torch.empty_like(op.tensor)
    if isinstance(op, AllGather):
        return [torch.empty_like(op.buffer)] * world
    return {rank: torch.empty(size, dtype=torch.uint8, device="meta") for rank, size in op.recvs.items()}


def _blank_encode(x: Tensor, *, of: Coder) -> Payload:
    return (torch.empty(nbytes(of.layout(x.numel())), dtype=torch.uint8, device="meta"),)


def _blank_decode(payload: Payload, count: int, *, of: Coder) -> Tensor:
    return torch.empty(count, device="meta")
