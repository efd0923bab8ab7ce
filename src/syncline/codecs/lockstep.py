"""Run a codec on N ranks in one process: advance the generators of all ranks together and answer their requests.

This is the reference for what a codec does, without sockets. `direct` answers requests in the simplest way (every
rank gets every payload); `syncline.exchange.emulate` answers them like an exchange.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.codecs.build import Codec, build
from syncline.codecs.group import batches
from syncline.codecs.requests import Gather, Merge, Out, Request, Result, adding, answer, lower
from syncline.codecs.state import flatten, unflatten
from syncline.codecs.wire import layout_of, nbytes, pack, unpack

Grads = Sequence[Sequence[Tensor]] | Callable[[int, int], Sequence[Tensor]]
Answerer = Callable[[Sequence[Request]], tuple[list[Any], list[int]]]
"""Takes one request per rank; returns each rank's answer and the bytes that each rank sent."""


@dataclass(frozen=True)
class Lockstep:
    """Result: `outputs[rank][tensor]` of the last step, the flat state of each rank, and bytes sent per rank."""

    outputs: list[list[Tensor]]
    states: list[dict[str, Tensor]]
    wire_bytes: list[int]


def lockstep(
    spec: str | Codec,
    grads: Grads,
    steps: int = 1,
    *,
    world_size: int | None = None,
    names: Sequence[str] | None = None,
    states: Sequence[Mapping[str, Tensor]] | None = None,
    first_step: int = 0,
    seed: int = 0,
    small: int = 0,
    servers: int = 0,
    answerer: Answerer | None = None,
) -> Lockstep:
    """Run a codec on N ranks for `steps` steps. `grads`: a list of tensors per rank, or a function of step and rank.

    A function needs `world_size`. `states` and `first_step` continue from an earlier result; `small` is the size up
    to which tensors are concatenated (see `group.batches`); `servers` adds ranks that have no gradient.
    """
    codec = build(spec)
    function = grads if callable(grads) else (lambda _step, rank: grads[rank])
    workers = world_size or (0 if callable(grads) else len(grads))
    if workers < 1:
        raise ValueError("the number of ranks is unknown: give world_size with a function of gradients")
    world = workers + servers
    kept: list[dict[str, dict[str, Tensor]]] = [unflatten(s) for s in states or [{}] * world]
    outputs: list[list[Tensor]] = []
    sent = [0] * world
    for step in range(first_step, first_step + steps):
        inputs = [list(function(step, rank)) for rank in range(workers)]
        inputs += [[torch.zeros_like(t) for t in inputs[0]] for _ in range(servers)]
        labels = list(names) if names else [f"p{i}" for i in range(len(inputs[0]))]
        outputs = [[None] * len(inputs[0]) for _ in range(world)]  # type: ignore[list-item]
        for batch in batches(codec, labels, [t.shape for t in inputs[0]], small=small):
            where = {"names": batch.names, "step": step, "world": workers, "seed": seed, "lengths": batch.lengths}
            runs = [codec.run(rank=rank, **where) for rank in range(world)]
            now = [
                run.start(batch.pack([inputs[rank][i] for i in batch.members]), batch.pack_state(kept[rank]))
                for rank, run in enumerate(runs)
            ]
            while not all(isinstance(n, Result) for n in now):
                requests = [n for n in now if not isinstance(n, Result)]
                if len(requests) != world:
                    raise ValueError(f"codec '{codec}' ended on some ranks and not on others")
                answers, took = (answerer or direct)(requests)
                sent = [s + t for s, t in zip(sent, took, strict=True)]
                now = [run.resume(a) for run, a in zip(runs, answers, strict=True)]
            for rank, result in enumerate(now):
                assert isinstance(result, Result)
                for i, tensor in zip(batch.members, batch.unpack(result.output), strict=True):
                    outputs[rank][i] = tensor
                kept[rank].update(batch.unpack_state(result.state))
    return Lockstep(outputs, [flatten(state) for state in kept], sent)


def direct(requests: Sequence[Request]) -> tuple[list[Any], list[int]]:
    """Answer requests by giving every rank all payloads; payloads that add are summed in their own precision."""
    kinds = {type(request) for request in requests}
    if len(kinds) != 1:
        raise ValueError(f"the ranks yield different requests: {', '.join(sorted(k.__name__ for k in kinds))}")
    gathers = [r for r in requests if isinstance(r, Gather)]
    if gathers:
        layout = layout_of(gathers[0].payload)
        buffers = [pack(r.payload) for r in gathers]
        return [[unpack(b, layout) for b in buffers] for _ in gathers], [b.numel() for b in buffers]
    merges = [lower(r) for r in requests]
    outs = _add(merges) if merges[0].coder.adds else _decode_all(merges)
    size = nbytes(merges[0].coder.layout(merges[0].tensor.numel()))
    return [answer(r, out) for r, out in zip(requests, outs, strict=True)], [size] * len(requests)


def _add(merges: list[Merge]) -> list[Out]:
    pairs = [adding(m, len(merges)) for m in merges]
    total = pairs[0][0].clone()
    for part, _ in pairs[1:]:
        total += part
    mean = merges[0].coder.decode((total,), merges[0].tensor.numel(), seed=merges[0].seed)
    return [m.out(mean.clone(), lost) for m, (_, lost) in zip(merges, pairs, strict=True)]


def _decode_all(merges: list[Merge]) -> list[Out]:
    count, layout = merges[0].tensor.numel(), merges[0].coder.layout(merges[0].tensor.numel())
    decoded, losses = [], []
    for m in merges:
        payload, lost = m.coder.encode_residual(m.tensor, m.residual, seed=m.seed)
        buffer = pack(payload)
        losses.append(lost)
        decoded.append(m.coder.decode(unpack(buffer, layout), count, seed=merges[0].seed))
    total = decoded[0].clone()
    for part in decoded[1:]:
        total += part
    mean = total / len(merges) if merges[0].mean else total
    return [m.out(mean.clone(), lost) for m, lost in zip(merges, losses, strict=True)]
