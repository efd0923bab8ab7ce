"""`ddp`, `ddp-bf16`, `ddp-fp16`, `ddp-powersgd`: torch's DistributedDataParallel with its own hooks.

A comm hook around torch's records each bucket's launch and end, so that the report can separate hidden from
exposed communication; the collectives are torch's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline._compat.ddp import GradBucket, around_buffers
from syncline.errors import UsageError
from syncline.train.strategies.base import Context, RingTrafficStrategy, Synchroniser, Traffic, ring_traffic, strategy

_Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class _Ddp(Synchroniser):
    # After its first pass DDP lays out its buckets again, and rounding of sums depends on the layout.
    needs_rehearsal = True

    def __init__(self, module: nn.Module, context: Context, strategy: "Ddp") -> None:
        super().__init__(module, context)
        self._plain = module
        self.module = DistributedDataParallel(
            module,
            process_group=context.group,
            bucket_cap_mb=strategy.bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=strategy.unused,
            static_graph=strategy.static_graph,
        )
        self._hook, self._state = strategy.hook, strategy.state(context)
        self._message_bytes = strategy.message_bytes
        self._last_launch: Any = None
        self.module.register_comm_hook(None, self._recorded)
        around_buffers(self.module, self._send_buffers)

    def backward(self, loss: Tensor) -> None:
        self._last_launch = None
        start = self.recorder.mark()
        loss.backward()
        # The pass has computed its last gradient when the last bucket is launched; what follows is waiting for it.
        end = self._last_launch if self._last_launch is not None else self.recorder.mark()
        self.recorder.add("backward", "backward", start, end)

    def synchronise_buffers(self) -> None:
        for buffer in self._plain.buffers():
            dist.broadcast(buffer, src=0, group=self.context.group)

    def _send_buffers(
        self, broadcast: Callable[..., None], buffers: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """Inside forward, where a late rank is waited for: that is no forward work."""
        begin = self.recorder.mark("exchange")
        broadcast(buffers, *args, **kwargs)
        end = self.recorder.mark("exchange")
        size = sum(buffer.nbytes for buffer in buffers)
        self.recorder.add("exchange", "broadcast", begin, end, unit="buffers", bytes=size)
        self.recorder.add_blocked(begin, end)

    def _recorded(self, _: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        start = self._last_launch = self.recorder.mark("exchange")
        if start is None:
            return self._hook(self._state, bucket)
        step, unit = self.recorder.step, f"bucket {bucket.index()}"
        size = self._message_bytes(bucket, self._state)  # before the hook, which counts its passes
        future = self._hook(self._state, bucket)
        end = self.recorder.mark_completion(future, bucket.buffer().device)
        if end is not None:
            self.recorder.add("exchange", "all-reduce", start, end, unit=unit, bytes=size, step=step)
            return future

        def done(finished: torch.futures.Future[Tensor]) -> Tensor:
            value = finished.value()
            end = self.recorder.mark("exchange")
            self.recorder.add("exchange", "all-reduce", start, end, unit=unit, bytes=size, step=step)
            return value

        return future.then(done)


@strategy("ddp")
class Ddp(RingTrafficStrategy):
    """Bucketed all-reduce that overlaps the backward pass; `unused=true` for models that leave parameters out.

    `static_graph=true` promises torch that every step uses the same parameters.
    """

    hook: _Hook = staticmethod(default_hooks.allreduce_hook)
    tuning: tuple[str, ...] = ("bucket_mb", "static_graph")

    def __init__(self, bucket_mb: float = 25.0, unused: bool = False, static_graph: bool = False) -> None:
        if bucket_mb <= 0:
            raise UsageError("bucket_mb must be positive, for example ddp(bucket_mb=25)")
        self.bucket_mb, self.unused, self.static_graph = bucket_mb, unused, static_graph

    def state(self, context: Context) -> Any:
        """The state that torch's hook takes."""
        return context.group

    def message_bytes(self, bucket: GradBucket, state: Any) -> int:
        """The bytes of a bucket that the hook sends."""
        return int(bucket.buffer().nbytes * self.shrink)

    def attach(self, module: nn.Module, context: Context, optimizer: Optimizer | None = None) -> Synchroniser:
        return _Ddp(module, context, self)


@strategy("ddp-bf16")
class DdpBf16(Ddp):
    """DDP that sends BF16."""

    formula = "2(N-1)/N*S/2"
    hook = staticmethod(default_hooks.bf16_compress_hook)
    shrink = 0.5


@strategy("ddp-fp16")
class DdpFp16(DdpBf16):
    """DDP that sends FP16."""

    hook = staticmethod(default_hooks.fp16_compress_hook)


@strategy("ddp-powersgd")
class DdpPowerSgd(Ddp):
    """DDP with torch's PowerSGD hook, warm-started, with error feedback; dense for the first two steps.

    `batch=true` is torch's `batch_tensors_with_same_shape`: equal matrices of a bucket are multiplied as one batch.
    """

    formula = "2(N-1)/N*(factors + vectors)"
    resumable = False  # torch's hook keeps its errors and factors by bucket, in its own object
    hook = staticmethod(powerSGD_hook)
    tuning = ("bucket_mb", "static_graph", "batch")

    def __init__(
        self,
        rank: int = 4,
        bucket_mb: float = 25.0,
        unused: bool = False,
        static_graph: bool = False,
        batch: bool = False,
    ) -> None:
        super().__init__(bucket_mb, unused, static_graph)
        if rank < 1:
            raise UsageError("ddp-powersgd needs rank >= 1, for example ddp-powersgd(rank=4)")
        self.rank, self.batch = rank, batch

    def state(self, context: Context) -> PowerSGDState:
        return PowerSGDState(
            process_group=context.group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=2,
            warm_start=True,
            batch_tensors_with_same_shape=self.batch,
        )

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        return ring_traffic(sum(self._elements(shape) for shape in shapes) * element, workers)

    def message_bytes(self, bucket: GradBucket, state: PowerSGDState) -> int:
        if state.iter < state.start_powerSGD_iter:
            return bucket.buffer().nbytes
        return sum(self._elements(gradient.shape) * gradient.element_size() for gradient in bucket.gradients())

    def _elements(self, shape: torch.Size) -> int:
        """Elements sent for one gradient, by the hook's rule: compress when it shrinks at least twofold."""
        size = shape.numel()
        if len(shape) < 2:
            return size
        rows, columns = shape[0], size // shape[0]
        factors = min(rows, columns, self.rank) * (rows + columns)
        return factors if factors * 2 < size else size
