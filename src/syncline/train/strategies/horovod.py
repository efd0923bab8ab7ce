"""The strategy `horovod`: gradients that are ready in the same cycle are all-reduced as one fusion buffer."""

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.train.strategies.background import BackgroundSynchroniser
from syncline.train.strategies.base import Context, RingTrafficStrategy, Synchroniser, flatten, strategy, unflatten


class FusionBuffers(BackgroundSynchroniser):
    """In every cycle, all-reduces the gradients that are ready on all ranks, packed into buffers."""

    def __init__(self, module: nn.Module, context: Context, *, fusion_bytes: int, cycle_ms: float) -> None:
        self._fusion_bytes = fusion_bytes
        super().__init__(module, context, cycle_ms=cycle_ms)

    def exchange_step(self) -> None:
        while not self.all_taken:
            self.exchange(self.ready_everywhere(wait=True))

    def exchange(self, ready: Sequence[int]) -> None:
        """Average these gradients."""
        self.reduce([self.gradient(number) for number in ready])

    def reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors by their means over the ranks, through fusion buffers."""
        for packed in _buffers(tensors, self._fusion_bytes):
            for flat, members in flatten(packed):
                with self.recorder.span("exchange", "all-reduce", unit=f"{len(members)} tensors", bytes=flat.nbytes):
                    dist.all_reduce(flat, group=self.group)
                unflatten(flat.div_(self.context.workers), members)


def _buffers(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The tensors in their order, in lists of at most `limit` bytes; a larger tensor is alone."""
    packed: list[Tensor] = []
    for tensor in tensors:
        if packed and sum(t.nbytes for t in packed) + tensor.nbytes > limit:
            yield packed
            packed = []
        packed.append(tensor)
    if packed:
        yield packed


@strategy("horovod")
class Horovod(RingTrafficStrategy):
    """As in Horovod: ranks agree once per cycle on the ready gradients and all-reduce them in a fusion buffer.

    A thread does this during the backward pass; the update waits for all gradients. The defaults are Horovod's.
    """

    tuning = ("fusion_mb", "cycle_ms")

    def __init__(self, fusion_mb: float = 128.0, cycle_ms: float = 1.0) -> None:
        if fusion_mb <= 0 or cycle_ms < 0:
            raise UsageError("horovod needs fusion_mb > 0 and cycle_ms >= 0, for example horovod(fusion_mb=128)")
        self.fusion_bytes, self.cycle_ms = int(fusion_mb * 2**20), cycle_ms

    def attach(self, module: nn.Module, context: Context, optimizer: Optimizer | None = None) -> Synchroniser:
        return FusionBuffers(module, context, fusion_bytes=self.fusion_bytes, cycle_ms=self.cycle_ms)
