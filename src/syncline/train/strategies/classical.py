"""The classical strategies: `single`, `local`, `all-reduce`, `gather-scatter`, `ring` and `server`.

They exchange gradients after the backward pass, and nothing is hidden behind compute.
"""

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.train.strategies.base import (
    Context,
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
    freezes = True
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
    """`dist.all_reduce` of each gradient after the backward pass: nothing is hidden behind compute."""

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
    """Rank 0 gathers all gradients, averages them and scatters the result: all bytes go through its link."""

    synchroniser = _GatherScatter
    formula = "2(N-1)S"

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        size = total_bytes(shapes, element) * ((workers - 1) if rank == 0 else 1)
        return Traffic(size, size, 2 * size)


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


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
            _exchange(operations)


@strategy("ring")
class Ring(RingTrafficStrategy):
    """All gradients as one flat tensor around a ring of ranks."""

    synchroniser = _Ring


def _parts(flat: Tensor, servers: int, part_bytes: int) -> list[list[Tensor]]:
    """For each server the parts of its shard; every shard has the same number of parts (some may be empty)."""
    largest = -(-flat.numel() // servers) * flat.element_size()
    count = max(1, -(-largest // part_bytes))
    return [list(shard.tensor_split(count)) for shard in flat.tensor_split(servers)]


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
    """Parameter servers as in BytePS; `servers` ranks are started beside the workers, each aggregates one shard.

    Each shard is cut into parts. In round i part i is pushed while part i-1 is pulled, in the same order on both sides,
    so that both directions of every link are busy and no backend can deadlock.
    """

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

    def serve(self, modules: Sequence[nn.Module], context: Context, *, steps: int) -> None:
        phases = [[p for p in module.parameters() if p.requires_grad] for module in modules]
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
                if mean is not None:
                    operations += [dist.P2POp(dist.isend, mean, w) for w in workers]
                with context.recorder.span("exchange", "serve", unit=f"part {i}", bytes=sum(t.nbytes for t in pushed)):
                    _exchange(operations)
                mean = reduce(Tensor.add_, pushed).div_(context.workers) if pushed else None
