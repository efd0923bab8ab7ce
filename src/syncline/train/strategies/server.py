"""`server`: dedicated aggregator ranks as in BytePS; workers push shards of the gradient and pull the means.

Gradients are flattened, cut into one shard per server and each shard into parts. In round i part i is pushed while part
i-1 is pulled, in the same order on both sides, so that both directions of every link are busy and no backend can
deadlock.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.train.strategies.base import (
    Context,
    Strategy,
    Synchroniser,
    Traffic,
    flatten,
    strategy,
    total_bytes,
    unflatten,
)


def _parts(flat: Tensor, servers: int, part_bytes: int) -> list[list[Tensor]]:
    """For each server the parts of its shard; every shard has the same number of parts (some may be empty)."""
    largest = -(-flat.numel() // servers) * flat.element_size()
    count = max(1, -(-largest // part_bytes))
    return [list(shard.tensor_split(count)) for shard in flat.tensor_split(servers)]


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


class _Worker(Synchroniser):
    def __init__(self, module: nn.Module, context: Context, *, servers: int, part_bytes: int) -> None:
        super().__init__(module, context)
        self.servers, self.part_bytes = servers, part_bytes

    def synchronise(self) -> None:
        for flat, members in flatten([gradient for _, gradient in self.gradients()]):
            shards = _parts(flat, self.servers, self.part_bytes)
            rounds = len(shards[0]) + 1
            for i in range(rounds):
                push = [(s, shard[i]) for s, shard in enumerate(shards) if i < rounds - 1 and shard[i].numel()]
                pull = [(s, shard[i - 1]) for s, shard in enumerate(shards) if i > 0 and shard[i - 1].numel()]
                operations = [dist.P2POp(dist.isend, part, self.context.workers + s) for s, part in push]
                operations += [dist.P2POp(dist.irecv, part, self.context.workers + s) for s, part in pull]
                size = sum(part.nbytes for _, part in push)
                with self.recorder.span("exchange", "push-pull", unit=f"part {i}", bytes=size):
                    _exchange(operations)
            unflatten(flat, members)


@strategy("server")
class Server(Strategy):
    """Parameter servers; `servers` ranks are started beside the workers, each aggregates one shard."""

    formula = "max(S, N*S/K)"

    def __init__(self, servers: int = 1, part_mb: float = 4.0) -> None:
        if servers < 1 or part_mb <= 0:
            raise UsageError("server needs servers >= 1 and part_mb > 0, for example server(servers=2, part_mb=4)")
        self.servers = servers
        self.part_bytes = max(1, int(part_mb * 2**20))

    def attach(self, module: nn.Module, context: Context, optimizer: Optimizer | None = None) -> Synchroniser:
        return _Worker(module, context, servers=self.servers, part_bytes=self.part_bytes)

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        size = total_bytes(shapes, element) * (1.0 if rank < workers else workers / self.servers)
        return Traffic(size, size, size)

    def serve(self, parameters: Iterable[Sequence[Tensor]], context: Context, *, steps: int) -> None:
        phases = list(parameters)
        for step in range(steps):
            context.recorder.step = step
            for tensors in phases:
                self._serve_phase(tensors, context)

    def _serve_phase(self, tensors: Sequence[Tensor], context: Context) -> None:
        workers = range(context.workers)
        for flat, _ in flatten([t.detach() for t in tensors]):
            parts = _parts(flat, self.servers, self.part_bytes)[context.rank - context.workers]
            mean: Tensor | None = None
            for i, part in enumerate([*parts, None]):
                pushed = [] if part is None else [torch.empty_like(part) for _ in workers if part.numel()]
                operations = [dist.P2POp(dist.irecv, t, w) for w, t in enumerate(pushed)]
                if mean is not None and mean.numel():
                    operations += [dist.P2POp(dist.isend, mean, w) for w in workers]
                with context.recorder.span("exchange", "serve", unit=f"part {i}", bytes=sum(t.nbytes for t in pushed)):
                    _exchange(operations)
                mean = None
                if pushed:
                    mean = pushed[0]
                    for other in pushed[1:]:
                        mean.add_(other)
                    mean.div_(context.workers)
