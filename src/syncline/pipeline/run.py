"""`Pipeline`: trains and evaluates a model on a (data, pipe) mesh; gradients of replicas go through the engine."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.engine.process_groups import Groups, parent_group, timeout_of
from syncline.engine.sync import Sync
from syncline.engine.tuning.device_clock import DeviceClock
from syncline.errors import UsageError
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.checkpoint import random_state, read_checkpoint, set_random_state, write_checkpoint
from syncline.pipeline.layout import Layout, tensors_of
from syncline.pipeline.layout_choice import LayoutChoice
from syncline.pipeline.measure import measure_network, wire_of
from syncline.pipeline.mesh import Shape, share
from syncline.pipeline.micro_batch_choice import MicroBatchChoice
from syncline.pipeline.peers import PipelinePeers
from syncline.pipeline.predict import SublayerTime
from syncline.pipeline.rank_clock import RankClock
from syncline.pipeline.rank_stages import RankStages
from syncline.pipeline.reshape import Offer, ReshapeCosts
from syncline.pipeline.shape_trial import ShapeTrial
from syncline.pipeline.stage import Prefix
from syncline.sim import Network
from syncline.trace import Recorder
from syncline.trace.record.recorder import process_recorder

Checkpoint: TypeAlias = str | Path | Callable[[], Path]
"""A file for `Pipeline.save`, or a function that all ranks call: it writes a checkpoint and returns its path."""


class Pipeline:
    """A model cut into stages, and replicas of that pipeline; every rank of the job takes part.

    The training loop stays as it is, with `train_batch` for the forward and backward pass:

        pipe = Pipeline(Blocks.of(model), optimizer, stages=4)
        for batch in loader:                       # this replica's share of the global batch: pipe.share(n)
            loss = pipe.train_batch(batch)
            optimizer.step()
            optimizer.zero_grad()

    The optimizer is over all parameters of the model, on every rank, and is never made again. A rank holds the values
    and the optimizer state of its own stages; other parameters are empty there until a reshape brings them.
    """

    def __init__(
        self,
        blocks: Blocks,
        optimizer: torch.optim.Optimizer,
        *,
        stages: int | None,
        micro_batches: int | None = None,
        confirm: bool = False,
        schedule: str = "1f1b",
        prefix: Prefix | None = None,
        times: Sequence[SublayerTime] | None = None,
        network: Network | None = None,
        timeout: float | None = None,
        recorder: Recorder | None = None,
        **exchange: Any,
    ) -> None:
        """Call it on every rank, with the model on its device; all ranks start with rank 0's values.

        Args:
            blocks: The model; it must be one that can be cut (`blocks.cut()`), with a loss.
            optimizer: The optimizer of all its parameters.
            stages: Ranks that share one copy of the model; a divisor of the number of ranks. The rest is replicas.
                None: the first steps try what is predicted to be fast, and the fastest stays (`tune_shape`). Every
                rank must be able to hold the whole model with its optimizer state then. It needs `times`.
            micro_batches: Micro-batches per step and replica, while there are stages. None: chosen by simulation of the
                first step where `times` are known, else twice the stages.
            confirm: Time several numbers of micro-batches in the first step of every shape (`confirm_micro_batches`),
                where `micro_batches` is None.
            schedule: `gpipe`, `1f1b`, `looped`, `interleaved`, `zero-bubble` or `zbv`.
            prefix: Supplies the activations behind the frozen sublayers of the first stage (a cache).
            times: Measured times of the sublayers (`measure_sublayers`, before the model is cut); stages and reshapes
                are then chosen by them. None: by the sublayers' parameters.
            network: Latency and bandwidth between the ranks, for predictions. None: measured here if there are `times`.
            timeout: Seconds after which a silent peer is an error. None: the process group's.
            recorder: Receives spans. None: the process's recorder.
            exchange: Options of `syncline.attach` for the gradients of replicas, such as `compress="powersgd(rank=4)"`.
        """
        if blocks.loss is None:
            raise UsageError(
                "the split of this model names no loss: give its Split loss=, a function of (output, *targets)"
            )
        if stages is None and times is None:
            raise UsageError("stages=None chooses by measured times: give times=measure_sublayers(blocks, batch)")
        blocks.cut()
        world = parent_group(None, caller="Pipeline")
        self.blocks, self.optimizer, self.schedule = blocks, optimizer, schedule
        self.device = next(blocks.model.parameters()).device
        self.recorder = recorder or process_recorder(self.device, engine=False)
        seconds = timeout_of(world, timeout)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        shape = Shape.of(self._world, stages or 1)
        self._micro_batches = MicroBatchChoice(schedule, micro_batches, confirm=confirm)
        self._micro_batches.check(shape)
        self._clock = RankClock(DeviceClock(self.device), self.device)
        self._trial = ShapeTrial(self._clock, trying=stages is None)
        self._peers = PipelinePeers(timeout=seconds)
        self.steps = 0
        self._prefix = prefix
        with self._peers.communicating("start"):
            known = [times]
            dist.broadcast_object_list(known, src=0)  # every rank measured its own, and all must decide alike
            if network is None and known[0] is not None and self._world > 1:
                network = measure_network(world, self.device)
        started = time.perf_counter()
        with self._peers.communicating("start"):
            with torch.no_grad():
                Groups(world, seconds).broadcast(list(tensors_of(blocks).values()), group=world)
            wire = wire_of(list(blocks.model.parameters()), exchange.get("compress"), exchange.get("exchange"))
            self._choice = LayoutChoice(
                blocks, shape,
                schedule=schedule, times=known[0], network=network, wire=wire, cached=None if prefix is None else 0.0,
            )  # fmt: skip
            layout = self._choice.lay_out(shape)
            self._stages = RankStages(
                blocks, optimizer, layout, prefix=prefix, recorder=self.recorder, timeout=seconds, options=exchange
            )
        self.costs = ReshapeCosts(time.perf_counter() - started)
        """What changes of the stages have cost."""

    # -- what users read

    @property
    def shape(self) -> Shape:
        """The number of stages and of replicas."""
        return self.layout.shape

    @property
    def layout(self) -> Layout:
        """The sublayers of each stage."""
        return self._stages.layout

    @property
    def replica(self) -> int:
        """The replica that this rank is a part of."""
        return self._stages.mesh.replica

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step and replica: 1 without stages, as asked, as simulated, or twice the stages."""
        return self._micro_batches.number(self.shape)

    @property
    def sync(self) -> Sync | None:
        """The engine of this rank's stages; None without replicas, and where everything is frozen."""
        return self._stages.gradients.sync

    def share(self, count: int) -> range:
        """The samples of a global batch of `count` that this replica trains on."""
        return share(count, self.replica, self.shape.replicas)

    # -- training

    def train_batch(
        self, batch: Sequence[Tensor], *, total: int | None = None, ids: Tensor | None = None, view: int = 0
    ) -> Tensor:
        """Forward, backward and exchange of one step; returns the mean loss of the global batch on every rank.

        All ranks of a replica give the same `batch`, the replica's share. `total` is the size of the global batch
        (default: this share times the replicas; give it where shares differ). `ids` and `view` are the numbers of the
        samples and of their augmentation, for a cache.
        """
        total = self._follow_batch(batch, total)
        if self._micro_batches.must_be_timed(self.shape) and not self.trying_shapes:
            started = time.perf_counter()
            self.confirm_micro_batches(batch, total=total, ids=ids, view=view)
            self.costs.add(time.perf_counter() - started)
        elif total > self._choice.samples:
            self._choice.samples = total
            if not self._micro_batches.is_timed(self.shape):
                self._micro_batches.simulate(self._choice, self.layout)
        with self._communicating("training"):
            loss = self._stages.runner.train(batch, self.micro_batches, total=total, ids=ids, view=view)
        self.steps += 1
        return loss

    def clip_gradients(self, max_norm: float) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all stages: call it on every rank before `optimizer.step()`."""
        with self._communicating("clipping"):
            return self._stages.gradients.clip(max_norm)

    def evaluate(self, batch: Sequence[Tensor]) -> tuple[int, int, float]:
        """(right answers, answers, sum of the loss over samples) of all replicas' batches, on every rank."""
        self._stages.follow_freeze(self.steps)
        with self._communicating("evaluation"):
            return self._stages.runner.evaluate(batch, self.micro_batches)

    def _follow_batch(self, batch: Sequence[Tensor], total: int | None) -> int:
        """A step with this batch comes: follow what is frozen now; returns the size of the global batch."""
        self._stages.follow_freeze(self.steps)
        if not self._stages.trains:
            raise UsageError("every parameter of the model is frozen: there is nothing to train")
        return len(batch[0]) * self.shape.replicas if total is None else total

    def _communicating(self, what: str) -> AbstractContextManager[None]:
        return self._peers.communicating(f"step {self.steps}: {what}")

    # -- changing the shape

    def reshape(
        self, *, stages: int, checkpoint: Checkpoint | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Continue with another number of stages; all ranks stay busy, as more or fewer replicas.

        Call it on every rank between two steps. Parameters, buffers, optimizer and codec state move to the ranks that
        need them; optimizer, learning rate, random state and the global batch stay. Old process groups are destroyed.
        With the same number, the stages are balanced again; where they are balanced already, nothing happens.
        `checkpoint`: a file that is written before anything moves, with `extra` (`save`), or a function that writes
        your own and returns its path; if a rank is lost, the error names the rank and this file.
        """
        shape = Shape.of(self._world, stages)
        self._trial.restart(chosen=shape != self.shape)
        self._change_shape(shape, checkpoint=checkpoint, extra=extra)

    def _change_shape(
        self, shape: Shape, *, checkpoint: Checkpoint | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._agree_on_cache()
        old, layout = self.layout, self._choice.lay_out(shape)
        self._micro_batches.check(shape)
        self._choice.allow(shape.stages)
        if layout == old:
            return
        change = f"{old.shape} -> {shape}"
        doing = f"reshape {change}"
        started = time.perf_counter()
        with self.recorder.span("between", "reshape", unit=change):
            if callable(checkpoint):
                doing += f", to be resumed from {checkpoint()}"
            elif checkpoint is not None:
                self.save(checkpoint, extra)
                doing += f", to be resumed from {checkpoint}"
            with self._communicating(doing):
                self._stages.move(layout, step=self.steps, what=change)
                self._micro_batches.simulate(self._choice, layout)
                dist.barrier()  # who has not seen that a rank was lost sees it here
        self.costs.measured(time.perf_counter() - started, changes_shape=shape != old.shape)

    def _agree_on_cache(self) -> None:
        """Take what reading costs on rank 0, which always has the first stage: all must lay out alike."""
        if self._prefix is not None:
            read = [self._prefix.read_s]
            with self._communicating("decision to reshape"):
                dist.broadcast_object_list(read, src=0)
            self._choice.cached = read[0]

    def offer(self, *, steps_left: int, step_s: float, fewer: bool = True) -> Offer | None:
        """The best reshape after a freeze, or the one that an unfreeze needs; None if there is nothing to change.

        Stages are balanced again or, with `fewer`, halved as often as the training part fits. `step_s` are the measured
        seconds of a step. The new step is predicted by the ratio of two simulated steps, or without measured times by
        an even division of the work. The cost is that of the last such change (`costs`). All ranks get rank 0's answer.
        """
        self._agree_on_cache()
        offer = self._choice.offer(
            self.layout, step_s=step_s, costs=self.costs, steps_left=steps_left,
            runs=self._micro_batches.runs_in, fewer=fewer,
        )  # fmt: skip
        if offer is None:
            return None
        decided: list[Offer] = [offer]
        with self._communicating("decision to reshape"):
            dist.broadcast_object_list(decided, src=0)
        return decided[0]

    def reshape_if_it_pays(
        self, *, steps_left: int, step_s: float, fewer: bool = True, checkpoint: Checkpoint | None = None
    ) -> Offer | None:
        """Reshape if the gain over the rest of the run exceeds the cost, or if blocks that train again need the room.

        Returns the offer, if there was one. `fewer` is that of `offer`, `checkpoint` that of `reshape`.
        """
        if self.trying_shapes:
            self.reshape(stages=self.shape.stages, checkpoint=checkpoint)  # the trial begins again with this balance
            return None
        offer = self.offer(steps_left=steps_left, step_s=step_s, fewer=fewer)
        if offer is not None and (offer.pays or offer.needed):
            self.reshape(stages=offer.new.stages, checkpoint=checkpoint)
        return offer

    def tune_shape(self) -> Shape:
        """With `stages=None`, try shapes in the first steps and keep the fastest; returns the shape of the next step.

        Call it on every rank in front of each step, before `share`. The steps are real ones: a reshape changes no
        value, so nothing is computed twice. Without `stages=None`, and after a `reshape`, it does nothing.
        """
        if not self.trying_shapes:
            return self.shape
        if self.steps:
            with self._communicating("trial of a shape"):
                others = partial(self._choice.shapes_to_try, self._micro_batches.runs_in)
                shape = self._trial.after_step(self.shape, others)
            if shape != self.shape:
                self._change_shape(shape)
        self._trial.begin_step()
        return self.shape

    @property
    def trying_shapes(self) -> bool:
        """Whether the first steps have still to choose the shape."""
        return self._trial.trying

    def confirm_micro_batches(
        self,
        batch: Sequence[Tensor],
        *,
        total: int | None = None,
        ids: Tensor | None = None,
        view: int = 0,
        most: int = 3,
    ) -> dict[int, float]:
        """Time the numbers of micro-batches that simulate best, and the least; keep the fastest. Seconds by number.

        Runs steps without an update: call it between two steps, on every rank, with arguments as for `train_batch`.
        Later reshapes choose again. Ranks that share cores gain less from many micro-batches than a simulation says.
        """
        whole = self._follow_batch(batch, total)
        self._choice.samples = max(self._choice.samples, whole)
        buffers = [(buffer, buffer.clone()) for buffer in self.blocks.model.buffers()]
        devices = [self.device] if self.device.type == "cuda" else []

        def step(number: int) -> float:
            with torch.random.fork_rng(devices=devices), self._communicating("training"):
                start = self._clock.mark()
                self._stages.runner.train(batch, number, total=whole, ids=ids, view=view)
                took = self._clock.seconds_since(start)
            self.optimizer.zero_grad()
            return took

        found = self._micro_batches.time(self._choice, self.layout, step, most=most)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)  # statistics of BatchNorm
        return found

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that training needs, whole on rank 0 and empty on the others; all ranks call it.

        `model` and `optimizer` are as a single process would save them; `frozen` are the names of frozen parameters.
        Random state and codec state belong to a rank: save `torch.get_rng_state()` and `pipe.sync.state_dict()` there.
        """
        with self._communicating("checkpoint"):
            state = self._stages.state()
        if self._rank:
            return {}
        shape = {"stages": self.shape.stages, "micro_batches": self.micro_batches, "trying_shapes": self.trying_shapes}
        return {**state, **shape, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from rank 0's `state_dict`, given whole on every rank, in any shape. Blocks freeze as they were."""
        self._stages.load_state(state, step=self.steps)
        same_shape = state["stages"] == self.shape.stages
        if same_shape and "micro_batches" in state:
            self._micro_batches.resume(self.shape, int(state["micro_batches"]))
        self._trial.restart(chosen=same_shape and not state.get("trying_shapes"))
        self.steps = int(state["steps"])

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint for any shape and number of ranks; all ranks call it. A half-written file never appears.

        It has the `state_dict`, every rank's random state, and `extra`: tensors, numbers and text, such as the freeze
        policy's state and the position in the data.
        """
        random = random_state(self.device)
        gathered: list[Any] = [None] * self._world
        state = self.state_dict()
        with self._communicating("checkpoint"):
            dist.all_gather_object(gathered, random)
            if self._rank == 0:
                write_checkpoint({**state, "random": gathered, "extra": dict(extra or {})}, path)
            dist.barrier()

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint of `save`; returns its `extra`. Every rank reads the file."""
        state = read_checkpoint(path)
        self.load_state_dict(state)
        if len(state["random"]) == self._world:
            set_random_state(state["random"][self._rank], self.device)
        extra: dict[str, Any] = state["extra"]
        return extra

    def close(self) -> None:
        """End the engine and destroy the process groups; the model keeps the values of this rank's stages."""
        self._stages.close()
        self._peers.close()
