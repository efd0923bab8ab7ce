"""Schedules of micro-batches over `torch.distributed.pipelining`, and stages that send no gradient to a frozen one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from syncline.errors import UsageError, unknown
from syncline.pipeline.stage_clock import StageClock


@dataclass(frozen=True)
class Kind:
    """A schedule of torch: its class, the stages per rank, and whether they are laid out as a V (0 1 2 2 1 0)."""

    make: Callable[..., Any]
    per_rank: int = 1
    v_shape: bool = False
    fills: bool = False
    """Whether it needs at least as many micro-batches as ranks."""
    rounds: bool = False
    """Whether micro-batches must divide evenly into rounds of about one per rank."""


SCHEDULES: dict[str, Kind] = {
    "gpipe": Kind(ScheduleGPipe),
    "1f1b": Kind(Schedule1F1B, fills=True),
    "looped": Kind(ScheduleLoopedBFS, per_rank=2),
    "interleaved": Kind(ScheduleInterleaved1F1B, per_rank=2, rounds=True),
    "zero-bubble": Kind(ScheduleInterleavedZeroBubble, per_rank=2, rounds=True),
    "zbv": Kind(ScheduleZBVZeroBubble, per_rank=2, v_shape=True),
}
"""The schedules by name; `zero-bubble` and `zbv` compute weight gradients where a rank would wait."""


def find_schedule(name: str) -> Kind:
    """The schedule of this name, or an error that lists the names."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]


def check_micro_batches(name: str, micro_batches: int, *, ranks: int) -> None:
    """Raise unless this schedule can run so many micro-batches on a pipeline of so many ranks."""
    kind = find_schedule(name)
    rounds = max(1, micro_batches // ranks)
    if micro_batches < 1 or (kind.fills and micro_batches < ranks) or (kind.rounds and micro_batches % rounds):
        raise UsageError(
            f"{micro_batches} micro-batches do not fit the schedule '{name}' on {ranks} stages: use {2 * ranks}"
        )


def rank_of_stage(stage: int, *, ranks: int, v_shape: bool) -> int:
    """The position in the pipeline that runs a stage."""
    lap, at = divmod(stage, ranks)
    return ranks - 1 - at if v_shape and lap % 2 else at


class Stage(PipelineStage):
    """A stage of torch that knows where the frozen part of the model ends.

    `frozen`: it has no backward pass. `frozen_below`: the stage before it is frozen, so nobody needs a gradient of this
    stage's input; torch sends one in some versions, and its zero-bubble schedules lose the gradients of this stage's
    weights.
    """

    def __init__(self, *args: Any, frozen_below: bool, frozen: bool, clock: StageClock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frozen_below, self.frozen, self._clock = frozen_below, frozen, clock
        self._complete: set[int] = set()

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """No gradient goes to a frozen stage."""
        if self.frozen_below:
            self.bwd_cache.pop(bwd_chunk_id, None)
            return []
        return super().get_bwd_send_ops(bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """A frozen stage waits for no gradient."""
        return [] if self.frozen else super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take a gradient from a stage on the same rank, unless this one is frozen."""
        if not self.frozen:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a micro-batch; above a frozen stage it is never divided into inputs and weights."""
        if self.frozen:
            _, inputs = self.fwd_cache.pop(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = (None,) * len(inputs)
            self._complete.add(bwd_chunk_id)
            return
        whole = full_backward or self.frozen_below
        with self._clock.run("backward"):
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=whole, last_backward=last_backward)
        if whole and not full_backward:
            self._complete.add(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The gradients of the weights, unless the pass before was a whole one."""
        if bwd_chunk_id in self._complete:
            self._complete.discard(bwd_chunk_id)
            return
        with self._clock.run("backward"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)


def make_schedule(
    name: str,
    modules: Sequence[tuple[int, nn.Module]],
    *,
    stages: int,
    frozen_stages: int,
    micro_batches: int,
    group: dist.ProcessGroup,
    device: torch.device,
    clock: StageClock,
    loss: Callable[..., torch.Tensor],
) -> Any:
    """The schedule of this rank's stages, given as (index, module)."""
    kind = find_schedule(name)
    made = [
        Stage(
            module, index, stages, device, group=group, frozen_below=0 < index <= frozen_stages,
            frozen=index < frozen_stages, clock=clock,
        )
        for index, module in modules
    ]  # fmt: skip
    single = kind.per_rank == 1
    return kind.make(made[0] if single else made, micro_batches, loss_fn=loss, scale_grads=False)
