"""`all-reduce`: after the backward pass, one collective per parameter, one after the other."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from syncline.train.strategies.base import (
    Strategy,
    Synchroniser,
    Traffic,
    ring_traffic,
    strategy,
    total_bytes,
)


class _AllReduce(Synchroniser):
    def synchronise(self) -> None:
        for name, gradient in self.gradients():
            with self.recorder.span("exchange", "all-reduce", unit=name, bytes=gradient.nbytes):
                dist.all_reduce(gradient, group=self.context.group)
            gradient.div_(self.context.workers)


@strategy("all-reduce")
class AllReduce(Strategy):
    """Part 2b of the course: `dist.all_reduce` of each gradient, nothing hidden behind compute."""

    synchroniser = _AllReduce
    formula = "2(N-1)/N*S"

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        return ring_traffic(total_bytes(shapes, element), workers)
