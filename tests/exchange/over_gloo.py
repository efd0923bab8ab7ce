"""Run codecs over an exchange on real ranks: the same driver loop as lockstep's, with a `Link` in between."""

import io
from typing import Any

import torch
from torch import Tensor

from syncline import codecs, exchange
from syncline.codecs import Result

SHAPES = ((33, 20), (5,), (1,), (0,), (33, 20))


def grads(step: int, rank: int, *, scale: float = 1.0) -> list[Tensor]:
    """Gradients that any process can make for any rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


def drive(
    link: exchange.Link, spec: str, steps: int, device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """This rank's outputs of the last step, flat state and bytes sent."""
    codec = codecs.build(spec)
    kept: dict[str, dict[str, Tensor]] = {}
    before = link.sent_bytes
    outputs: list[Any] = [None] * len(SHAPES)
    names = [f"p{i}" for i in range(len(SHAPES))]
    where = {"rank": link.position.rank, "world": link.position.workers}
    for step in range(steps):
        mine = (
            grads(step, link.position.rank)
            if link.position.rank < link.position.workers
            else [torch.zeros(s) for s in SHAPES]
        )
        mine = [g.to(device) for g in mine]
        for batch in codecs.batches(codec, names, SHAPES):
            run = codec.run(names=batch.names, step=step, **where)
            now = run.start(batch.pack([mine[i] for i in batch.members]), batch.pack_state(kept))
            while not isinstance(now, Result):
                now = run.resume(link.ask(now))
            for i, tensor in zip(batch.members, batch.unpack(now.output), strict=True):
                outputs[i] = tensor
            kept.update(batch.unpack_state(now.state))
    return outputs, codecs.flatten(kept), link.sent_bytes - before


def every_pair(rank: int, world: int, pairs: list[tuple[str, str]], steps: int) -> bytes:
    """All pairs of codec and exchange on this rank; saved, because tensors would outlive the process that sends."""
    links = {name: exchange.connect(name) for _, name in pairs}
    out = {f"{spec} over {name}": drive(links[name], spec, steps) for spec, name in pairs}
    file = io.BytesIO()
    torch.save(out, file)
    return file.getvalue()


def loaded(data: bytes) -> dict[str, Any]:
    """What `every_pair` saved."""
    out: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return out
