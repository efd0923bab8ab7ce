"""The classical strategies: `single`, `local`, `all-reduce`, `gather-scatter` and `ring`.

They exchange gradients after the backward pass, and nothing is hidden behind compute.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.train.strategies.base import (
    RingTrafficStrategy,
    Strategy,
    Synchroniser,
    Traffic,
    flatten,
    strategy,
    total_bytes,
    unflatten,
)

_SEGMENT_BYTES = 2**20


@strategy("single")
class Single(Strategy):
    """One rank trains on the whole batch; the reference of every comparison."""

    alone = True
    formula = "0"


@strategy("local")
class Local(Strategy):
    """Every rank trains on its share of the batch, so replicas drift apart: the step time of a network without cost."""

    formula = "0"


class _AllReduce(Synchroniser):
    def synchronise(self) -> None:
        for name, gradient in self.gradients():
            with self.recorder.span("exchange", "all-reduce", unit=name, bytes=gradient.nbytes):
                dist.all_reduce(gradient, group=self.context.group)
            gradient.div_(self.context.workers)


@strategy("all-reduce")
class AllReduce(RingTrafficStrategy):
    """Part 2b of the course: `dist.all_reduce` of each gradient, nothing hidden behind compute."""

    synchroniser = _AllReduce


def ring_order_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of contiguous tensors, added in the order in which Gloo's all-reduce adds them around its ring.

    Rounding depends on the order, and training amplifies rounding: with the same order `gather-scatter` and
    `all-reduce` give the same bits, so a difference between their losses would be an error. Gloo cuts a tensor into one
    chunk per rank, of whole segments; chunk c starts at rank c-1, visits the ranks downwards and ends at rank c.
    """
    ranks, flat = len(parts), [part.view(-1) for part in parts]
    size, element = flat[0].numel(), parts[0].element_size()
    segments = max(-(-size * element // _SEGMENT_BYTES), 2 * ranks)
    per_rank = -(-segments // ranks)
    chunk = -(-size // (per_rank * ranks)) * per_rank
    total = torch.empty_like(parts[0])
    for c in range(ranks if size else 0):
        piece = slice(c * chunk, (c + 1) * chunk)
        out = total.view(-1)[piece]
        out.copy_(flat[c - 1][piece])
        for r in range(2, ranks + 1):
            out.add_(flat[(c - r) % ranks][piece])
    return total


class _GatherScatter(Synchroniser):
    def synchronise(self) -> None:
        root, workers, group = self.context.rank == 0, self.context.workers, self.context.group
        for name, gradient in self.gradients():
            sent = gradient.contiguous()
            parts = [torch.empty_like(sent) for _ in range(workers)] if root else None
            with self.recorder.span("exchange", "gather", unit=name, bytes=gradient.nbytes):
                dist.gather(sent, parts, dst=0, group=group)
            means = None
            if parts is not None:
                means = [ring_order_sum(parts).div_(workers)] * workers
            with self.recorder.span("exchange", "scatter", unit=name, bytes=gradient.nbytes):
                dist.scatter(sent, means, src=0, group=group)
            if sent is not gradient:
                gradient.copy_(sent)


@strategy("gather-scatter")
class GatherScatter(Strategy):
    """Part 2a of the course: all gradients go through the link of rank 0, in and then out."""

    synchroniser = _GatherScatter
    formula = "2(N-1)S"

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        size = total_bytes(shapes, element) * ((workers - 1) if rank == 0 else 1)
        return Traffic(size, size, 2 * size)


class _Ring(Synchroniser):
    def synchronise(self) -> None:
        workers = self.context.workers
        for flat, members in flatten([gradient for _, gradient in self.gradients()]):
            chunks = flat.tensor_split(workers)
            rank = self.context.rank
            for hop in range(workers - 1):
                target = chunks[(rank - hop - 1) % workers]
                incoming = torch.empty_like(target)
                self._hop(chunks[(rank - hop) % workers], incoming, f"add {hop}")
                target.add_(incoming)
            for hop in range(workers - 1):
                self._hop(chunks[(rank + 1 - hop) % workers], chunks[(rank - hop) % workers], f"spread {hop}")
            unflatten(flat.div_(workers), members)

    def _hop(self, outgoing: Tensor, incoming: Tensor, unit: str) -> None:
        right = (self.context.rank + 1) % self.context.workers
        left = (self.context.rank - 1) % self.context.workers
        # Every rank knows every chunk's size, so both sides of an empty chunk skip it.
        operations = []
        if outgoing.numel():
            operations.append(dist.P2POp(dist.isend, outgoing, right, self.context.group))
        if incoming.numel():
            operations.append(dist.P2POp(dist.irecv, incoming, left, self.context.group))
        with self.recorder.span("exchange", "ring", unit=unit, bytes=outgoing.nbytes):
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()


@strategy("ring")
class Ring(RingTrafficStrategy):
    """All gradients as one flat tensor around a ring of ranks."""

    synchroniser = _Ring
