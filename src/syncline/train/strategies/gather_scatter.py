"""`gather-scatter`: rank 0 gathers every gradient, averages it and scatters the mean."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.train.strategies.base import Strategy, Synchroniser, Traffic, strategy, total_bytes

_SEGMENT_BYTES = 2**20


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
