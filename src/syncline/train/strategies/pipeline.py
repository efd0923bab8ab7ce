"""A phase's module as a pipeline of stages and replicas that shrinks while blocks freeze, with an activation cache."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.cluster.quantities import parse_bytes
from syncline.engine.process_groups import Groups, parent_group, timeout_of
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.cache import ActivationCache, shared_cache
from syncline.pipeline.freeze import Freezer
from syncline.pipeline.measure import measure_sublayers
from syncline.pipeline.run import Pipeline
from syncline.train.strategies.base import Context, Synchroniser


class Piped(Synchroniser):
    """Trains through `Pipeline`: all ranks of a replica take its share of the batch, each runs its own stages."""

    pipelined = True

    def __init__(self, module: nn.Module, context: Context, optimizer: Optimizer, **exchange: Any) -> None:
        """`exchange`: the options of `attach` for the gradients of replicas."""
        super().__init__(module, context)
        shrink = context.shrink
        self._blocks, self._dp = Blocks.of(module), shrink.dp
        self._followed: int | None = self._blocks.frozen()
        """The frozen blocks that the shape was chosen for; None if that is not known."""
        self._cache: ActivationCache | None = None
        if shrink.cache:
            layers = [sublayer.module for sublayer in self._blocks.cut()]
            disk, gpu = (parse_bytes(text) if text else 0 for text in (shrink.cache_disk, shrink.cache_gpu))
            self._cache = shared_cache(
                layers,
                group=context.group,
                node=shrink.node,
                samples=shrink.samples,
                ram=parse_bytes(shrink.cache),
                disk=disk,
                gpu=gpu,
                epochs=shrink.epochs,
            )
        times = measure_sublayers(self._blocks, shrink.example()) if shrink.pipe != 1 and shrink.example else None
        self.pipe = Pipeline(
            self._blocks,
            optimizer,
            stages=shrink.pipe or None,
            confirm=True,
            prefix=self._cache,
            times=times,
            recorder=context.recorder,
            **exchange,
        )
        world = parent_group(context.group)
        self._groups = Groups(world, timeout_of(world, None))
        self._groups.open(0)
        if shrink.freeze:
            self.freeze = self._freezer = Freezer(
                self._blocks, shrink.freeze, optimizers=[optimizer], peers=self._groups, recorder=context.recorder
            )

    def part(self) -> tuple[int, int]:
        self.pipe.tune_shape()  # between two steps, as it must be: this is asked once in front of each
        return self.pipe.replica, self.pipe.shape.replicas

    def forward(self, batch: tuple[Tensor, ...], *, samples: Tensor, view: int) -> Tensor:
        """The whole step but the update: the passes of micro-batches are mixed in a pipeline."""
        if self.freeze is not None:
            self._freezer.before_forward(batch)
        return self.pipe.train_batch(batch, ids=samples, view=view)

    def prefetch(self, coming: Callable[[], Tensor], *, view: int) -> None:
        if self._cache is not None:
            self._cache.prefetch(coming(), view)

    def notes(self) -> list[str]:
        if self._cache is None:
            return []
        stats, off = self._cache.stats, self._cache.why_off
        asked = stats.hits + stats.continued + stats.misses
        read = f"gave rank {self.context.rank} {stats.hits} of {asked} activations" if asked else "was not asked"
        held = (stats.gpu_bytes + stats.ram_bytes + stats.disk_bytes) / 1e6
        return [f"the cache {read} and holds {held:.3g} MB" + (f"; it is off: {off}" if off else "")]

    def backward(self, loss: Tensor) -> None:
        pass

    def evaluate(self, batch: tuple[Tensor, ...]) -> tuple[float, int, float] | None:
        mine = self.pipe.share(len(batch[0]))
        return self.pipe.evaluate(tuple(part[mine.start : mine.stop] for part in batch))

    def follow_freeze(
        self, *, step_s: float, steps_left: int, epochs_left: float, save: Callable[[], Path] | None
    ) -> None:
        """Balance the stages again, or make fewer stages and more replicas where that pays."""
        if self._cache is not None:
            self._cache.epochs = epochs_left
        if not steps_left or self._blocks.frozen() == self._followed:
            return
        self._followed = self._blocks.frozen()
        offer = self.pipe.reshape_if_it_pays(steps_left=steps_left, step_s=step_s, fewer=self._dp, checkpoint=save)
        if offer is not None and self.context.rank == 0:
            print(f"syncline: {offer}", file=sys.stderr)

    def synchronised_bytes(self) -> int:
        if self.pipe.shape.replicas == 1:
            return 0
        return super().synchronised_bytes()

    def whole_state(self) -> dict[str, Any] | None:
        return self.pipe.state_dict()

    def load_whole_state(self, state: Mapping[str, Any]) -> None:
        self._followed = None
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name not in state["frozen"])  # stages are balanced by what trains
        stages = int(state["stages"])
        # The shape that the run had; another number of ranks starts with the stages that were asked for, and a run that
        # had not chosen its shape yet tries shapes again.
        trying = self.pipe.trying_shapes and state.get("trying_shapes")
        if stages and not trying and stages != self.pipe.shape.stages and self.context.workers % stages == 0:
            recorder = self.context.recorder
            recorder.enabled, enabled = False, recorder.enabled  # it is no part of the training
            self.pipe.reshape(stages=stages)
            recorder.enabled = enabled
        self.pipe.load_state_dict(state)

    def finish(self) -> None:
        if self.pipe.sync is not None:
            self.pipe.sync.wait()

    def close(self) -> None:
        if self.freeze is not None:
            self.freeze.close()
        self.pipe.close()
        if self._cache is not None:
            self._cache.close()
        self._groups.close()
