"""`all-reduce`: after the backward pass, one collective per parameter, one after the other."""

import torch.distributed as dist

from syncline.train.strategies.base import RingTrafficStrategy, Synchroniser, strategy


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
