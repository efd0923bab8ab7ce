"""`Pipeline`: trains and evaluates a model on a (data, pipe) mesh; gradients of replicas go through the engine."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._compat.groups import default_store
from syncline.engine.health.peer_errors import is_communication_error
from syncline.engine.health.peers import Peers
from syncline.engine.process_groups import Groups, parent_group, timeout_of
from syncline.engine.sync import Sync
from syncline.engine.tuning.device_clock import DeviceClock
from syncline.errors import PeerError, UsageError
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.checkpoint import random_state, read_checkpoint, set_random_state, write_checkpoint
from syncline.pipeline.gradients import ReplicaGradients
from syncline.pipeline.layout import Layout, frozen_sublayers, holders, tensors_of
from syncline.pipeline.layout_choice import LayoutChoice
from syncline.pipeline.mesh import Mesh, Shape, share
from syncline.pipeline.predict import SublayerTime
from syncline.pipeline.reshape import Offer
from syncline.pipeline.schedule import check_micro_batches
from syncline.pipeline.shape_trial import ShapeTrial
from syncline.pipeline.stage import Prefix
from syncline.pipeline.stage_runner import StageRunner
from syncline.pipeline.transfer import collect_state, compare_replicas, drop_others, move_state, put_state
from syncline.sim import Network
from syncline.trace import Recorder
from syncline.trace.record.recorder import process_recorder

_FIRST_RESHAPE_S = 2.0
"""Assumed cost of the first reshape: new groups and a new engine, which the start may have been without."""


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
            network: Latency and bandwidth between the ranks, for predictions.
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
        self._timeout = timeout_of(world, timeout)
        self._options, self._prefix = exchange, prefix
        self._asked_micro_batches, self._chosen_micro_batches = micro_batches, 0
        self._confirm = confirm and micro_batches is None
        self._confirmed: Shape | None = None
        """The shape whose number of micro-batches was timed."""
        self._shapes = {name: tensor.shape for name, tensor in tensors_of(blocks).items()}
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        shape = Shape.of(self._world, stages or 1)
        self._may_try_shapes = stages is None
        self._trial: ShapeTrial | None = None
        self._clock = DeviceClock(self.device)
        self._step_began: Any = None
        """When `tune_shape` was called last."""
        self._parameters = list(blocks.model.parameters())
        self._training: list[bool] = []
        """Which parameters trained in the last step."""
        self._check(shape)
        self._peers = Peers(
            default_store(),
            rank=self._rank,
            world=self._world,
            timeout=self._timeout,
            holder=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
            prefix="syncline/pipeline",
        )
        self._peers.start()
        self.steps = 0
        started = time.perf_counter()
        with self._communicating("start"):
            with torch.no_grad():
                Groups(world, self._timeout).broadcast(list(tensors_of(blocks).values()), group=world)
            known = [times]
            dist.broadcast_object_list(known, src=0)  # every rank measured its own, and all must decide alike
            self._choice = LayoutChoice(
                blocks, shape, schedule=schedule, times=known[0], network=network, cached=prefix is not None
            )
            self._layout = self._choice.lay_out(shape)
            self._mesh = Mesh(shape, timeout=self._timeout)
            drop_others(blocks, optimizer, self._holders_here())
            self._gradients = self._replica_gradients()
            self._gradients.attach()
        self._runner = self._make_runner()
        self.reshape_s = max(_FIRST_RESHAPE_S, time.perf_counter() - started)
        """Seconds of the last change of shape; before there was one, an assumption or the seconds of the start."""

    # -- what users read

    @property
    def shape(self) -> Shape:
        """The number of stages and of replicas."""
        return self._layout.shape

    @property
    def layout(self) -> Layout:
        """The sublayers of each stage."""
        return self._layout

    @property
    def replica(self) -> int:
        """The replica that this rank is a part of."""
        return self._mesh.replica

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step and replica: 1 without stages, as asked, as simulated, or twice the stages."""
        return self._micro_batches_in(self.shape)

    @property
    def sync(self) -> Sync | None:
        """The engine of this rank's stages; None without replicas, and where everything is frozen."""
        return self._gradients.sync

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
        self._follow_freeze()
        if not any(self._training):
            raise UsageError("every parameter of the model is frozen: there is nothing to train")
        total = len(batch[0]) * self.shape.replicas if total is None else total
        if self._confirm and self._confirmed != self.shape and not self._may_try_shapes:
            self._confirmed = self.shape
            self.confirm_micro_batches(batch, total=total, ids=ids, view=view)
        if total > self._choice.samples:
            self._choice.samples = total
            if self._confirmed != self.shape:
                self._choose_micro_batches()
        with self._communicating(f"step {self.steps}: training"):
            loss = self._runner.train(batch, self.micro_batches, total=total, ids=ids, view=view)
        self.steps += 1
        return loss

    def clip_gradients(self, max_norm: float) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all stages: call it on every rank before `optimizer.step()`."""
        with self._communicating(f"step {self.steps}: clipping"):
            return self._gradients.clip(max_norm)

    def evaluate(self, batch: Sequence[Tensor]) -> tuple[int, int, float]:
        """(right answers, answers, sum of the loss over samples) of all replicas' batches, on every rank."""
        self._follow_freeze()
        blocks = self.blocks
        sums = torch.zeros(3, dtype=torch.float64)
        modes = [(module, module.training) for module in blocks.model.modules()]
        blocks.model.eval()
        try:
            with torch.no_grad(), self._communicating(f"step {self.steps}: evaluation"):
                for output, targets in self._runner.outputs(batch, self.micro_batches):
                    if not len(targets[0]):
                        continue
                    assert blocks.loss is not None
                    right, answers = blocks.correct(output, *targets) if blocks.correct else (0, 0)
                    loss = float(blocks.loss(output, *targets)) * len(targets[0])
                    sums += torch.tensor([float(right), answers, loss], dtype=torch.float64)
                sums = sums.to(self._words)
                dist.all_reduce(sums)
        finally:
            for module, mode in modes:
                module.training = mode
        return int(sums[0]), int(sums[1]), float(sums[2])

    # -- stages

    def _check(self, shape: Shape) -> None:
        if shape.stages > 1:
            check_micro_batches(self.schedule, self._micro_batches_in(shape), ranks=shape.stages)

    def _runs_in(self, shape: Shape) -> bool:
        try:
            self._check(shape)
        except UsageError:
            return False
        return True

    def _micro_batches_in(self, shape: Shape) -> int:
        if shape.stages == 1:
            return 1
        return self._asked_micro_batches or self._chosen_micro_batches or 2 * shape.stages

    def _holders_here(self) -> set[str]:
        here = self._layout.shape.place(self._rank)[1]
        return {name for name, where in holders(self.blocks, self._layout).items() if here in where}

    def _make_runner(self) -> StageRunner:
        return StageRunner(
            self.blocks,
            self._layout,
            self._mesh,
            self._gradients,
            prefix=self._prefix,
            device=self.device,
            recorder=self.recorder,
        )

    def _renew_runner(self) -> None:
        self._runner.forget_schedule()  # the two refer to each other, which would keep their memory for a while
        self._runner = self._make_runner()

    def _choose_micro_batches(self) -> None:
        """Take the number with the shortest simulated step, where sublayers were measured."""
        if not self._choice.measured or self._asked_micro_batches or self.shape.stages == 1:
            return
        best = self._choice.predicted(self._layout)
        if best and best[0][1] != self.micro_batches:
            self._chosen_micro_batches = best[0][1]
            self._runner.forget_schedule()

    def _follow_freeze(self) -> None:
        """Blocks were frozen or unfrozen since the last step: the stages keep their sublayers, with another prefix."""
        training = [p.requires_grad for p in self._parameters]
        if training == self._training:
            return
        self._training = training
        if frozen_sublayers(self.blocks) != self._runner.frozen:
            self._renew_runner()
            self._gradients.follow_freeze(self.steps)

    def _replica_gradients(self) -> ReplicaGradients:
        return ReplicaGradients(
            self.blocks, self.optimizer, self._layout, self._mesh, timeout=self._timeout, options=self._options
        )

    @contextmanager
    def _communicating(self, what: str) -> Iterator[None]:
        """Communication of this rank; if a peer is lost, the error names it on every rank."""
        self._peers.doing = what
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as error:
            if not is_communication_error(error):
                self._peers.leave(error)
                raise
            raise self._peers.explain(what, error) from error

    # -- changing the shape

    def reshape(
        self,
        *,
        stages: int,
        checkpoint: str | Path | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue with another number of stages; all ranks stay busy, as more or fewer replicas.

        Call it on every rank between two steps. Parameters, buffers, optimizer and codec state move to the ranks that
        need them; optimizer, learning rate, random state and the global batch stay. Old process groups are destroyed.
        With the same number, the stages are balanced again; where they are balanced already, nothing happens.
        `checkpoint`: a file that is written before anything moves, with `extra` (`save`); if a rank is lost, the error
        names the rank and this file.
        """
        shape = Shape.of(self._world, stages)
        self._may_try_shapes = self._may_try_shapes and shape == self.shape
        self._trial = self._step_began = None  # other layers train now: a trial begins again
        self._change_shape(shape, checkpoint=checkpoint, extra=extra)

    def _change_shape(
        self, shape: Shape, *, checkpoint: str | Path | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        old, layout = self._layout, self._choice.lay_out(shape)
        self._check(shape)
        self._choice.allow(shape.stages)
        change = f"{old.shape} -> {shape}"
        started = time.perf_counter()
        doing = f"step {self.steps}: reshape {change}"
        if checkpoint is not None:
            self.save(checkpoint, extra)
            doing += f", to be resumed from {checkpoint}"
        if layout == old:
            return
        self._layout = layout
        with self.recorder.span("between", "reshape", unit=change), self._communicating(doing):
            codec_state = self._gradients.detach()
            codec_state = move_state(
                self.blocks, self.optimizer, codec_state, old, layout, self._mesh, shapes=self._shapes
            )
            dist.barrier()  # nobody needs the old groups any more
            if shape != old.shape:
                self._mesh.close()
                self._mesh = Mesh(shape, timeout=self._timeout)
            # Before an engine is attached, which begins with rank 0's values.
            compare_replicas(self.blocks, self.optimizer, self._holders_here(), self._mesh.data, change)
            self._gradients = self._replica_gradients()
            self._gradients.attach(codec_state, step=self.steps)
            self._renew_runner()
            self._choose_micro_batches()
        if shape != old.shape:
            self.reshape_s = time.perf_counter() - started

    def offer(self, *, steps_left: int, step_s: float) -> Offer | None:
        """The reshape that a freeze allows, or that an unfreeze needs, with its predicted gain; None if there is none.

        `step_s` are the measured seconds of a step. The new step is predicted by the ratio of two simulated steps,
        or without measured times by an even division of the work. The cost is that of the last
        change of shape (`reshape_s`). All ranks get rank 0's answer.
        """
        shape = self._choice.smallest()
        if shape == self.shape:
            return None
        now, new = (self._choice.predicted(layout)[0][0] for layout in (self._layout, self._choice.lay_out(shape)))
        decided = torch.tensor([step_s, step_s * new / now, self.reshape_s], dtype=torch.float64, device=self._words)
        with self._communicating(f"step {self.steps}: decision to reshape"):
            dist.broadcast(decided, src=0)
        step_s, new_step_s, cost_s = decided.tolist()
        return Offer(self.shape, shape, step_s, new_step_s, cost_s, steps_left)

    def reshape_if_it_pays(self, *, steps_left: int, step_s: float) -> Offer | None:
        """Reshape if the gain over the rest of the run exceeds the cost, or if blocks that train again need the room.

        Returns the offer, if there was one.
        """
        offer = self.offer(steps_left=steps_left, step_s=step_s)
        if offer is not None and (offer.pays or offer.needed):
            self.reshape(stages=offer.new.stages)
        return offer

    def tune_shape(self) -> Shape:
        """With `stages=None`, try shapes in the first steps and keep the fastest; returns the shape of the next step.

        Call it on every rank in front of each step, before `share`. The steps are real ones: a reshape changes no
        value, so nothing is computed twice. Without `stages=None`, and after a `reshape`, it does nothing.
        """
        if not self._may_try_shapes:
            return self.shape
        now = self._clock.mark()
        if self._step_began is not None and self.steps:
            if self._trial is None:
                others = [shape for shape in self._choice.shapes_to_try(self._runs_in) if shape != self.shape]
                self._trial = ShapeTrial([self.shape, *others])
            took = torch.tensor(self._clock.seconds(self._step_began, now), dtype=torch.float64, device=self._words)
            with self._communicating(f"step {self.steps}: trial of a shape"):
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
            shape = self._trial.after_step(float(took))
            self._may_try_shapes = not self._trial.over
            if shape is not None and shape != self.shape:
                self._change_shape(shape)
        self._step_began = self._clock.mark()
        return self.shape

    @property
    def trying_shapes(self) -> bool:
        """Whether the first steps have still to choose the shape."""
        return self._may_try_shapes

    @property
    def _words(self) -> torch.device:
        """The device of small messages to all ranks."""
        return self.device if dist.get_backend() == "nccl" else torch.device("cpu")

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
        total = len(batch[0]) * self.shape.replicas if total is None else total
        self._choice.samples = max(self._choice.samples, total)
        seconds: dict[int, float] = {}
        clock = self._clock
        devices = [self.device] if self.device.type == "cuda" else []
        simulated = [number for _, number in self._choice.predicted(self._layout)]
        tried = dict.fromkeys([*simulated[: most - 1], min(simulated), *simulated])
        for number in list(tried)[: most if self.shape.stages > 1 else 0]:
            self._asked_micro_batches = number
            self._runner.forget_schedule()
            with torch.random.fork_rng(devices=devices):
                for repeat in range(3):
                    start = clock.mark()
                    self.train_batch(batch, total=total, ids=ids, view=view)
                    took = torch.tensor(clock.seconds(start, clock.mark()), dtype=torch.float64, device=self._words)
                    self.optimizer.zero_grad()
                    self.steps -= 1
                    dist.all_reduce(took, op=dist.ReduceOp.MAX)
                    if repeat:  # the first one makes connections
                        seconds[number] = min(seconds.get(number, float("inf")), float(took))
        if seconds:
            self._asked_micro_batches, self._chosen_micro_batches = None, min(seconds, key=lambda n: seconds[n])
            self._runner.forget_schedule()
        return seconds

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that training needs, whole on rank 0 and empty on the others; all ranks call it.

        `model` and `optimizer` are as a single process would save them; `frozen` are the names of frozen parameters.
        Random state and codec state belong to a rank: save `torch.get_rng_state()` and `pipe.sync.state_dict()` there.
        """
        if self.sync is not None:
            self.sync.wait()
        with self._communicating(f"step {self.steps}: checkpoint"):
            state = collect_state(self.blocks, self.optimizer, self._layout, self._mesh, shapes=self._shapes)
        if self._rank:
            return {}
        frozen = [name for name, p in self.blocks.model.named_parameters() if not p.requires_grad]
        shape = {"stages": self.shape.stages, "micro_batches": self.micro_batches}
        return {**state, "frozen": frozen, **shape, "trying_shapes": self._may_try_shapes, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from rank 0's `state_dict`, given whole on every rank, in any shape. Blocks freeze as they were."""
        for name, p in self.blocks.model.named_parameters():
            p.requires_grad_(name not in state["frozen"])
        if self.sync is not None:
            self.sync.wait()
        put_state(self.blocks, self.optimizer, state, self._holders_here())
        self._renew_runner()  # a cache must see that the frozen weights are other ones
        self._gradients.follow_freeze(self.steps)
        if self._confirm and state["stages"] == self.shape.stages > 1 and "micro_batches" in state:
            # As the run had them: another number adds gradients in another order.
            self._chosen_micro_batches, self._confirmed = int(state["micro_batches"]), self.shape
        chosen = not state.get("trying_shapes") and state["stages"] == self.shape.stages
        self._may_try_shapes = self._may_try_shapes and not chosen
        self._trial = self._step_began = None
        self.steps = int(state["steps"])

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint for any shape and number of ranks; all ranks call it. A half-written file never appears.

        It has the `state_dict`, every rank's random state, and `extra`: tensors, numbers and text, such as the freeze
        policy's state and the position in the data.
        """
        random = random_state(self.device)
        gathered: list[Any] = [None] * self._world
        state = self.state_dict()
        with self._communicating(f"step {self.steps}: checkpoint"):
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
        self._gradients.detach()
        self._mesh.close()
        self._peers.close()
