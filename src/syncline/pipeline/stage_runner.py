"""`StageRunner`: the passes of a batch through this rank's stages, for training and for evaluation.

It belongs to one layout and one number of frozen sublayers; a reshape or a freeze makes a new one.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.pipeline.blocks import Blocks, as_values
from syncline.pipeline.forward import run_forward
from syncline.pipeline.gradients import ReplicaGradients
from syncline.pipeline.layout import Layout, frozen_sublayers
from syncline.pipeline.mesh import Mesh, message_device
from syncline.pipeline.micro_batches import MicroBatches, rows_needed, split
from syncline.pipeline.schedule import make_schedule
from syncline.pipeline.stage import Feed, Prefix, StageModule
from syncline.pipeline.stage_clock import StageClock
from syncline.trace import Recorder


class StageRunner:
    """Runs batches through this rank's stages; the gradients of a step go to `gradients`."""

    def __init__(
        self,
        blocks: Blocks,
        layout: Layout,
        mesh: Mesh,
        gradients: ReplicaGradients,
        *,
        prefix: Prefix | None,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        """`prefix`: supplies the activations behind the frozen sublayers of the first stage."""
        self._blocks, self._layout, self._mesh, self._gradients = blocks, layout, mesh, gradients
        self._device, self._recorder, self._clock = device, recorder, StageClock(recorder)
        frozen = self.frozen = frozen_sublayers(blocks)
        """The number of frozen sublayers."""
        sublayers = blocks.cut()
        self._modules = {
            stage: StageModule(
                [sublayers[at] for at in layout.stages[stage]],
                frozen=max(0, min(frozen, layout.stages[stage].stop) - layout.stages[stage].start),
                first=stage == 0,
                prefix=prefix,
                clock=self._clock if layout.shape.stages > 1 else None,
            )
            for stage in layout.stages_at(mesh.position)
        }
        self._schedule: Any = None
        self._schedule_of = (0, 0)
        """The micro-batches of the schedule, and their rows."""

    def close(self) -> None:
        """Free the schedule: it and this object refer to each other, which would keep their memory for a while."""
        self._schedule = None

    def train(
        self, batch: Sequence[Tensor], micro_batches: int, *, total: int, ids: Tensor | None, view: int
    ) -> Tensor:
        """Forward, backward and exchange of a step; returns the mean loss of the global batch. All ranks call it.

        `total` is the size of the global batch; `ids` and `view` are the numbers of the samples and of their
        augmentation.
        """
        if self._layout.shape.stages == 1:
            return self._train_whole(batch, total, ids, view)
        number, most_rows = self._schedule_of
        rows = rows_needed(len(batch[0]), micro_batches)
        if micro_batches != number or rows > most_rows:
            self._schedule, most_rows = self._make_schedule(micro_batches), rows
            self._schedule_of = micro_batches, rows
        self._feed_stages(split(batch, micro_batches, rows=most_rows), ids, view, total)
        losses: list[Tensor] = []
        sync = self._gradients.sync
        with self._clock.schedule(), nullcontext() if sync is None else sync.no_sync():
            self._run_schedule(micro_batches, losses)
        loss, arrival = self._begin_mean(losses)
        self._gradients.exchange()
        arrival.wait()
        return loss

    def evaluate(self, batch: Sequence[Tensor], micro_batches: int) -> tuple[int, int, float]:
        """(right answers, answers, sum of the loss over samples) of all replicas' batches. All ranks call it."""
        blocks = self._blocks
        modes = [(module, module.training) for module in blocks.model.modules()]
        blocks.model.eval()
        try:
            with torch.no_grad():
                sums = self._score(split(batch, micro_batches)).to(message_device(self._device))
                dist.all_reduce(sums)
        finally:
            for module, mode in modes:
                module.training = mode
        return int(sums[0]), int(sums[1]), float(sums[2])

    def _score(self, batches: MicroBatches) -> Tensor:
        """The sums of `evaluate` over this replica's batch, on the rank that runs the last stage; else zeros."""
        blocks, sums = self._blocks, torch.zeros(3, dtype=torch.float64)
        assert blocks.loss is not None
        self._feed_stages(batches, None, 0, batches.samples)
        outputs = run_forward(
            self._modules, self._layout, self._mesh, micro_batches=len(batches.counts), device=self._device
        )
        for index, output in enumerate(outputs):
            if count := batches.counts[index]:
                scored, targets = _rows(output, count), self._feed.targets(index)
                right, answers = blocks.correct(scored, *targets) if blocks.correct else (0, 0)
                loss = float(blocks.loss(scored, *targets)) * count
                sums += torch.tensor([float(right), answers, loss], dtype=torch.float64)
        return sums

    def _train_whole(self, batch: Sequence[Tensor], total: int, ids: Tensor | None, view: int) -> Tensor:
        """One stage: a plain forward and backward pass, which overlaps with the exchange."""
        (module,) = self._modules.values()
        self._feed_stages(split(batch, 1), ids, view, total)
        only = torch.tensor(0)
        with self._recorder.span("forward"):
            loss = self._loss(module(only), only)
        mean, arrival = self._begin_mean([loss])
        with self._recorder.span("backward"):
            loss.backward()
        arrival.wait()
        return mean

    def _begin_mean(self, losses: Iterable[Tensor]) -> tuple[Tensor, dist.Work]:
        """Begin to sum this rank's losses over all ranks; the sum is on its way while gradients are made and sent."""
        loss = torch.zeros((), device=self._device, dtype=torch.float64)
        for part in losses:
            loss += part.detach()
        loss /= self._layout.shape.replicas
        arrival = dist.all_reduce(loss, async_op=True)
        assert arrival is not None
        return loss, arrival

    def _make_schedule(self, micro_batches: int) -> Any:
        return make_schedule(
            self._layout.schedule,
            list(self._modules.items()),
            stages=len(self._layout.stages),
            frozen_stages=self._layout.frozen_stages(self.frozen),
            micro_batches=micro_batches,
            group=self._mesh.pipe,
            device=self._device,
            clock=self._clock,
            loss=self._timed_loss,
        )

    def _run_schedule(self, micro_batches: int, losses: list[Tensor]) -> None:
        indices = torch.arange(micro_batches)
        args = (indices,) if 0 in self._modules else ()
        if len(self._layout.stages) - 1 in self._modules:
            self._schedule.step(*args, target=indices, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*args, return_outputs=False)

    def _timed_loss(self, output: Any, index: Tensor) -> Tensor:
        with self._clock.run("forward"):
            return self._loss(output, index)

    def _loss(self, output: Any, index: Tensor) -> Tensor:
        """The loss of the real samples of a micro-batch, by their share of the batch."""
        assert self._blocks.loss is not None
        count = self._feed.batches.counts[int(index)]
        if not count:
            return torch.stack([(part * 0).sum() for part in as_values(output)]).sum()
        loss = self._blocks.loss(_rows(output, count), *self._feed.targets(int(index)))
        return loss * (count * self._layout.shape.replicas / self._total)

    def _feed_stages(self, batches: MicroBatches, ids: Tensor | None, view: int, total: int) -> None:
        if not batches.samples:
            ids = None  # padding of an empty batch is no sample of the data: a cache must not keep it
        if ids is not None:
            ids = torch.cat([part for (part,) in split([ids], len(batches.counts), rows=batches.rows).parts])
        self._feed, self._total = Feed(batches, ids, view, inputs=self._blocks.inputs), total
        for module in self._modules.values():
            module.feed = self._feed


def _rows(output: Any, count: int) -> Any:
    """The first rows of a model's output, which is a tensor or several."""
    return output[:count] if isinstance(output, Tensor) else tuple(part[:count] for part in output)
