"""`ring`: an all-reduce made of send and receive, with N-1 hops that add and N-1 hops that spread the sums."""

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.train.strategies.base import RingTrafficStrategy, Synchroniser, flatten, strategy, unflatten


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
