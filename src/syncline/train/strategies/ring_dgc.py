"""The strategy `ring-dgc`: Deep Gradient Compression as published, over Horovod's ring collectives.

The ranks all-gather the largest values of each matrix, and all-reduce vectors, which are small, without compression.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from syncline.codecs.algorithms.graddrop import SLACK, decode, encode
from syncline.errors import UsageError
from syncline.train.strategies.base import Context, Strategy, Synchroniser, Traffic, ring_traffic, strategy
from syncline.train.strategies.horovod import FusionBuffers

_STAGES, _FIRST = 5, 0.25
"""The published warm-up: five stages of equal length that send 25%, 6.25%, 1.6%, 0.4% and 0.1% of the values."""
_INDEX_BYTES = 4


def warm_up_ratio(step: int, *, ratio: float, steps: int) -> float:
    """The share of values that is sent in a step, with a warm-up of `steps` steps.

    >>> [warm_up_ratio(step, ratio=0.01, steps=10) for step in (0, 2, 4, 6, 10)]
    [0.25, 0.0625, 0.015625, 0.01, 0.01]
    """
    if step >= steps:
        return ratio
    return float(max(ratio, _FIRST ** (1 + step * _STAGES // steps)))


class _RingDgc(FusionBuffers):
    def __init__(
        self, module: nn.Module, context: Context, strategy: "RingDgc", momenta: Mapping[Tensor, float]
    ) -> None:
        self._strategy, self._momenta = strategy, momenta
        self._momentum: dict[str, Tensor] = {}
        self._residual: dict[str, Tensor] = {}
        self.warm_up_steps = strategy.warmup + 2
        self.steady_after = strategy.warmup + 4
        super().__init__(module, context, fusion_bytes=strategy.fusion_bytes, cycle_ms=strategy.cycle_ms)

    def exchange(self, ready: Sequence[int]) -> None:
        dense = [number for number in ready if self.gradient(number).dim() < 2]
        self.reduce([self.gradient(number) for number in dense])
        for number in dense:
            # The mean of the ranks' momenta is the momentum of the mean.
            gradient = self.gradient(number)
            gradient.copy_(self._with_momentum(number, gradient))
        if sparse := [number for number in ready if self.gradient(number).dim() >= 2]:
            self._exchange_sparse(sparse)

    def _exchange_sparse(self, numbers: Sequence[int]) -> None:
        ratio = warm_up_ratio(self.step, ratio=self._strategy.ratio, steps=self._strategy.warmup)
        packed = [self._compress(number, ratio) for number in numbers]
        sent = torch.cat([part.view(torch.uint8) for pair in packed for part in pair])
        received = [torch.empty_like(sent) for _ in range(self.context.workers)]
        with self.recorder.span("exchange", "all-gather", unit=f"{len(numbers)} tensors", bytes=sent.nbytes):
            dist.all_gather(received, sent, group=self.group)
        pieces = [buffer.split([part.nbytes for pair in packed for part in pair]) for buffer in received]
        for place, number in enumerate(numbers):
            gradient = self.gradient(number)
            values, indices = packed[place]
            total = torch.zeros(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
            for piece in pieces:  # in rank order: all ranks get the same bits
                payload = piece[2 * place].view(values.dtype), piece[2 * place + 1].view(indices.dtype)
                total = decode(payload, gradient.numel(), onto=total)
            gradient.copy_(total.div_(self.context.workers).view_as(gradient))

    def _compress(self, number: int, ratio: float) -> tuple[Tensor, Tensor]:
        """Add the corrected momentum to what was not sent before; take the largest values, and forget them."""
        name, gradient = self.parameters[number][0], self.gradient(number)
        clip = self._strategy.clip
        if clip:
            limit = clip / math.sqrt(self.context.workers)
            gradient = gradient * (limit / gradient.norm().clamp(min=1e-30)).clamp(max=1)
        momentum = self._with_momentum(number, gradient)
        error = self._residual.setdefault(name, torch.zeros_like(momentum)).add_(momentum)
        seed = (self.step * len(self.parameters) + number) * self.context.workers + self.context.rank
        values, indices = encode(error.view(-1), ratio=ratio, seed=seed)
        unsent = decode((values, indices), error.numel()).view_as(error) == 0
        error.mul_(unsent)
        momentum.mul_(unsent)  # momentum factor masking
        return values, indices

    def _with_momentum(self, number: int, gradient: Tensor) -> Tensor:
        """The momentum after this gradient; kept, so that the caller may change it."""
        name, parameter = self.parameters[number]
        kept = self._momentum.setdefault(name, torch.zeros_like(gradient, memory_format=torch.contiguous_format))
        return kept.mul_(self._momenta.get(parameter, 0.0)).add_(gradient)

    def state_dict(self) -> dict[str, Tensor]:
        kinds = {"momentum": self._momentum, "error": self._residual}
        return {f"{name}.{key}": tensor for key, tensors in kinds.items() for name, tensor in tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for key, tensors in (("momentum", self._momentum), ("error", self._residual)):
            tensors.clear()
            for name, parameter in self.parameters:
                if (kept := state.get(f"{name}.{key}")) is not None:
                    tensors[name] = kept.to(parameter.device).clone()


@strategy("ring-dgc")
class RingDgc(Strategy):
    """As Horovod with DGC: momentum correction and masking, clipping, warm-up; sent during the backward pass.

    DGC takes over the momentum of SGD. With other optimizers it is plain error feedback. `clip` bounds the norm of each
    gradient, times 1/sqrt(ranks); 0: no clipping. `warmup`: steps in which more values are sent.
    """

    tuning = ("fusion_mb", "cycle_ms")
    formula = "(N-1)*(2.5*ratio*matrices) + 2(N-1)/N*vectors"

    def __init__(
        self,
        ratio: float = 0.001,
        clip: float = 0.0,
        warmup: int = 10,
        fusion_mb: float = 128.0,
        cycle_ms: float = 1.0,
    ) -> None:
        if not 0 < ratio <= 1 or clip < 0 or warmup < 0 or fusion_mb <= 0 or cycle_ms < 0:
            raise UsageError(
                "ring-dgc needs ratio in 0..1, clip, warmup and cycle_ms of 0 or more, and fusion_mb > 0, for example"
                " ring-dgc(ratio=0.001, clip=1, warmup=100)"
            )
        self.ratio, self.clip, self.warmup = ratio, clip, warmup
        self.fusion_bytes, self.cycle_ms = int(fusion_mb * 2**20), cycle_ms

    def attach(self, module: nn.Module, context: Context, optimizer: Optimizer | None = None) -> Synchroniser:
        return _RingDgc(module, context, self, take_momentum(optimizer))

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        vectors = ring_traffic(sum(shape.numel() for shape in shapes if len(shape) < 2) * element, workers).sent
        slots = sum(
            min(shape.numel(), math.ceil(SLACK * self.ratio * shape.numel())) for shape in shapes if len(shape) >= 2
        )
        sent = vectors + (workers - 1) * slots * (element + _INDEX_BYTES)
        return Traffic(sent, sent, sent)


def take_momentum(optimizer: Optimizer | None) -> dict[Tensor, float]:
    """The momentum of each parameter under SGD; the optimizer itself has none from now on."""
    momenta: dict[Tensor, float] = {}
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        if group["nesterov"] or group["dampening"]:
            raise UsageError("ring-dgc replaces the momentum of SGD: use sgd without nesterov and dampening")
        momenta |= dict.fromkeys(group["params"], group["momentum"])
        group["momentum"] = 0.0
    return momenta
