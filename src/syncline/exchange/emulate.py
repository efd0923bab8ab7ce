"""Emulate all ranks of an exchange in one process, with the generators that real ranks use."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from syncline.codecs import Codec, Lockstep, Request
from syncline.codecs import lockstep as codec_lockstep
from syncline.codecs.lockstep import Answerer, Grads
from syncline.exchange.build import Exchange, build, check, op_bytes
from syncline.exchange.moves import AllGather, AllReduce, Move, Op, Position


def emulate(exchange: str | Exchange) -> Answerer:
    """A function that answers requests (one per rank) like this exchange, for `codecs.lockstep(answerer=...)`."""
    carrier = build(exchange)

    def respond(requests: Sequence[Request]) -> tuple[list[Any], list[int]]:
        world = len(requests)
        workers = carrier.workers(world)
        moves = [carrier.moves(request, Position(r, world, workers)) for r, request in enumerate(requests)]
        answers: list[Any] = [None] * world
        sent = [0] * world
        waiting: dict[int, Op] = {}
        mail: dict[tuple[int, int], list[Tensor]] = {}
        ready: dict[int, Any] = dict.fromkeys(range(world))
        while ready:
            for rank, got in ready.items():
                try:
                    op = moves[rank].send(got)
                except StopIteration as end:
                    answers[rank] = end.value
                    continue
                sent[rank] += op_bytes(op, world)
                waiting[rank] = op
                for to, buffer in op.sends.items() if isinstance(op, Move) else ():
                    mail.setdefault((rank, to), []).append(buffer.clone())
            ready = _deliver(waiting, mail, world)
            if not ready and waiting:
                raise RuntimeError(
                    f"exchange '{carrier}': ranks {sorted(waiting)} wait for messages that no rank sends"
                )
        return answers, sent

    return respond


def lockstep(
    spec: str | Codec, grads: Grads, steps: int = 1, *, exchange: str | Exchange = "allgather", **more: Any
) -> Lockstep:
    """`codecs.lockstep` over an exchange. Dedicated servers come after the ranks of `grads`, with zero gradients."""
    carrier = check(spec, exchange)
    options = dict(carrier.options)
    servers = options.get("servers", 1) if options.get("dedicated") else 0
    return codec_lockstep(spec, grads, steps, servers=servers, answerer=emulate(carrier), **more)


def _deliver(waiting: dict[int, Op], mail: dict[tuple[int, int], list[Tensor]], world: int) -> dict[int, Any]:
    """Answers of all ranks whose move can complete now; removes these ranks from `waiting`."""
    ready: dict[int, Any] = {}
    if len(waiting) == world:
        ops = [waiting[rank] for rank in range(world)]
        gathers = [op.buffer for op in ops if isinstance(op, AllGather)]
        reduces = [op.tensor for op in ops if isinstance(op, AllReduce)]
        if len(gathers) == world:
            ready = {rank: [b.clone() for b in gathers] for rank in range(world)}
        if len(reduces) == world:
            total = reduces[0].clone()
            for tensor in reduces[1:]:
                total += tensor
            ready = {rank: total.clone() for rank in range(world)}
    for rank, op in waiting.items():
        if isinstance(op, Move) and all(mail.get((peer, rank)) for peer in op.recvs):
            ready[rank] = {peer: _sized(mail[peer, rank].pop(0), op.recvs[peer]) for peer in op.recvs}
    for rank in ready:
        del waiting[rank]
    return ready


def _sized(buffer: Tensor, size: int) -> Tensor:
    assert buffer.numel() == size, f"{buffer.numel()} bytes were sent where {size} are expected"
    return buffer
