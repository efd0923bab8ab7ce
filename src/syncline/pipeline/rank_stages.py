"""`RankStages`: this rank's stages in a layout, with all that a reshape makes again: groups, engine and passes."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from syncline.pipeline.blocks import Blocks
from syncline.pipeline.gradients import ReplicaGradients
from syncline.pipeline.layout import Layout, frozen_sublayers, tensors_of
from syncline.pipeline.mesh import Mesh
from syncline.pipeline.stage import Prefix
from syncline.pipeline.stage_runner import StageRunner
from syncline.pipeline.transfer import collect_state, compare_replicas, drop_others, move_state, put_state
from syncline.trace import Recorder


class RankStages:
    """The values, the process groups, the engine and the passes of this rank's stages. All ranks call it together."""

    def __init__(
        self,
        blocks: Blocks,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        *,
        prefix: Prefix | None,
        recorder: Recorder,
        timeout: float,
        options: Mapping[str, Any],
    ) -> None:
        """Make it while this rank holds the whole model. `options` are those of `attach`, for replicas' gradients."""
        self._blocks, self._optimizer, self._recorder = blocks, optimizer, recorder
        self._prefix, self._timeout, self._options = prefix, timeout, options
        self._shapes = {name: tensor.shape for name, tensor in tensors_of(blocks).items()}
        self._parameters = list(blocks.model.parameters())
        self._training: list[bool] = []
        """Which parameters trained in the last step."""
        self.layout = layout
        """The sublayers of each stage."""
        self.mesh = Mesh(layout.shape, timeout=timeout)
        drop_others(blocks, optimizer, layout)
        self.gradients = self._make_gradients()
        self.gradients.attach()
        self.runner = self._make_runner()

    @property
    def trains(self) -> bool:
        """Whether any parameter of the model trains, as of the last `follow_freeze`."""
        return any(self._training)

    def follow_freeze(self, step: int) -> None:
        """Blocks were frozen or unfrozen since the last step: the stages keep their sublayers, with another prefix."""
        training = [p.requires_grad for p in self._parameters]
        if training == self._training:
            return
        self._training = training
        if frozen_sublayers(self._blocks) != self.runner.frozen:
            self._renew_runner()
            self.gradients.follow_freeze(step)

    def move(self, layout: Layout, *, step: int, what: str) -> None:
        """Bring values, optimizer and codec state to another layout; `what` names the change in errors."""
        old, self.layout = self.layout, layout
        codec_state = move_state(
            self._blocks, self._optimizer, self.gradients.detach(), old, layout, self.mesh, shapes=self._shapes
        )
        dist.barrier()  # nobody needs the old groups any more
        if layout.shape != old.shape:
            self.mesh.close()
            self.mesh = Mesh(layout.shape, timeout=self._timeout)
        # Before an engine is attached, which begins with rank 0's values.
        compare_replicas(self._blocks, self._optimizer, layout, self.mesh.data, what)
        self.gradients = self._make_gradients()
        self.gradients.attach(codec_state, step=step)
        self._renew_runner()

    def state(self) -> dict[str, Any]:
        """Model and optimizer as one process would save them, and the names of frozen parameters; whole on rank 0."""
        self._wait()
        frozen = [name for name, p in self._blocks.model.named_parameters() if not p.requires_grad]
        state = collect_state(self._blocks, self._optimizer, self.layout, self.mesh, shapes=self._shapes)
        return {**state, "frozen": frozen}

    def load_state(self, state: Mapping[str, Any], *, step: int) -> None:
        """Take over this rank's part of rank 0's `state`."""
        for name, p in self._blocks.model.named_parameters():
            p.requires_grad_(name not in state["frozen"])
        self._wait()
        put_state(self._blocks, self._optimizer, state, self.layout)
        self._renew_runner()  # a cache must see that the frozen weights are other ones
        self.gradients.follow_freeze(step)

    def close(self) -> None:
        """End the engine and destroy the groups; the values stay."""
        self.gradients.detach()
        self.mesh.close()

    def _wait(self) -> None:
        if self.gradients.sync is not None:
            self.gradients.sync.wait()

    def _make_gradients(self) -> ReplicaGradients:
        return ReplicaGradients(
            self._blocks,
            self._optimizer,
            self.layout,
            self.mesh,
            timeout=self._timeout,
            options={"recorder": self._recorder, **self._options},
        )

    def _make_runner(self) -> StageRunner:
        return StageRunner(
            self._blocks,
            self.layout,
            self.mesh,
            self.gradients,
            prefix=self._prefix,
            device=self._parameters[0].device,
            recorder=self._recorder,
        )

    def _renew_runner(self) -> None:
        self.runner.close()
        self.runner = self._make_runner()
