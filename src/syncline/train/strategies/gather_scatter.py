"""`gather-scatter`: rank 0 gathers every gradient, averages it and scatters the mean."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from syncline.train.strategies.base import Strategy, Synchroniser, Traffic, strategy, total_bytes


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
                mean = parts[0]
                for part in parts[1:]:
                    mean.add_(part)
                means = [mean.div_(workers)] * workers
            with self.recorder.span("exchange", "scatter", unit=name, bytes=gradient.nbytes):
                dist.scatter(sent, means, src=0, group=group)
            if sent is not gradient:
                gradient.copy_(sent)


@strategy("gather-scatter")
class GatherScatter(Strategy):
    """The course's part 2a: everything passes through rank 0's link, in and then out."""

    synchroniser = _GatherScatter
    formula = "2(N-1)S"

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        size = total_bytes(shapes, element) * ((workers - 1) if rank == 0 else 1)
        return Traffic(size, size, 2 * size)
