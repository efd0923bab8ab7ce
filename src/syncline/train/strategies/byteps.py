"""The strategy `byteps`: every rank is also a parameter server; partitions are pushed and pulled by priority."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.train.strategies.background import BackgroundSynchroniser
from syncline.train.strategies.base import Context, RingTrafficStrategy, Synchroniser, strategy, unflatten


@dataclass
class _Round:
    """Partitions on their way: shard s of `flat` is summed by rank s."""

    flat: Tensor
    members: list[Tensor]
    pushed: list[Tensor] = field(default_factory=list)
    """This rank's shard as the workers pushed it, in rank order."""
    mean: Tensor | None = None


class _PushPull(BackgroundSynchroniser):
    """In each round, the partitions that the next forward needs first are pushed, those of the last round pulled."""

    def __init__(
        self, module: nn.Module, context: Context, *, part_bytes: int, credit_bytes: int, cycle_ms: float
    ) -> None:
        self._part_bytes, self._credit = part_bytes, credit_bytes
        super().__init__(module, context, cycle_ms=cycle_ms)

    def exchange_step(self) -> None:
        # A heap of partitions by (parameter, part): parameters are numbered in the order of the forward pass.
        waiting: list[tuple[int, int, Tensor]] = []
        pulled: _Round | None = None
        while True:
            idle = not waiting and pulled is None
            if not self.all_taken:
                for number in self.ready_everywhere(wait=idle):
                    for part, values in enumerate(self._partitions(self.gradient(number))):
                        heapq.heappush(waiting, (number, part, values))
            elif idle:
                return
            pushed = self._next_round(waiting)
            self._run_round(pushed, pulled)
            pulled = pushed

    def _partitions(self, gradient: Tensor) -> Sequence[Tensor]:
        """Views of the gradient of at most the size of a partition; one that is not contiguous stays whole."""
        if not gradient.is_contiguous():
            return [gradient]
        parts: Sequence[Tensor] = gradient.view(-1).split(max(1, self._part_bytes // gradient.element_size()))
        return parts

    def _next_round(self, waiting: list[tuple[int, int, Tensor]]) -> _Round | None:
        """Take the most urgent partitions, of one dtype, up to the credit."""
        members: list[Tensor] = []
        while waiting and (not members or waiting[0][2].dtype == members[0].dtype):
            if members and sum(t.nbytes for t in members) + waiting[0][2].nbytes > self._credit:
                break
            members.append(heapq.heappop(waiting)[2])
        return _Round(torch.cat([t.reshape(-1) for t in members]), members) if members else None

    def _run_round(self, pushed: _Round | None, pulled: _Round | None) -> None:
        """Push one round to the servers while the means of the other one come back.

        Both directions of every link are busy, and all ranks send to a peer in the same order.
        """
        me, workers = self.context.rank, self.context.workers
        operations: list[dist.P2POp] = []

        def send(tensor: Tensor, peer: int) -> None:
            if tensor.numel():
                operations.append(dist.P2POp(dist.isend, tensor, peer, self.group))

        def receive(tensor: Tensor, peer: int) -> None:
            if tensor.numel():
                operations.append(dist.P2POp(dist.irecv, tensor, peer, self.group))

        peers = [rank for rank in range(workers) if rank != me]
        if pushed is not None:
            shards = pushed.flat.tensor_split(workers)
            pushed.pushed = [shards[me] if rank == me else torch.empty_like(shards[me]) for rank in range(workers)]
            for peer in peers:
                send(shards[peer], peer)
                receive(pushed.pushed[peer], peer)
        if pulled is not None:
            assert pulled.mean is not None
            shards = pulled.flat.tensor_split(workers)
            for peer in peers:
                send(pulled.mean, peer)
                receive(shards[peer], peer)
        if operations:
            size = sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
            with self.recorder.span("exchange", "push-pull", bytes=size):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        if pushed is not None:
            # In rank order on every server, so that the sum does not depend on which message came first.
            pushed.mean = reduce(torch.add, pushed.pushed[1:], pushed.pushed[0]).div(workers)
        if pulled is not None:
            assert pulled.mean is not None
            pulled.flat.tensor_split(workers)[me].copy_(pulled.mean)
            unflatten(pulled.flat, pulled.members)


@strategy("byteps")
class BytePs(RingTrafficStrategy):
    """As in BytePS with its servers on the workers: partitions are pushed and pulled during the backward pass.

    Partitions of parameters that the next forward pass needs first go first; `credit` partitions are in flight. They
    are spread evenly over the servers. The update waits for all gradients, as BytePS's optimizer does.
    """

    tuning = ("part_mb", "credit", "cycle_ms")

    def __init__(self, part_mb: float = 4.0, credit: int = 4, cycle_ms: float = 0.0) -> None:
        if part_mb <= 0 or credit < 1 or cycle_ms < 0:
            raise UsageError("byteps needs part_mb > 0, credit >= 1, cycle_ms >= 0, for example byteps(part_mb=4)")
        self.part_bytes = max(1, int(part_mb * 2**20))
        self.credit_bytes, self.cycle_ms = credit * self.part_bytes, cycle_ms

    def attach(self, module: nn.Module, context: Context, optimizer: Optimizer | None = None) -> Synchroniser:
        sizes = {"part_bytes": self.part_bytes, "credit_bytes": self.credit_bytes}
        return _PushPull(module, context, cycle_ms=self.cycle_ms, **sizes)
