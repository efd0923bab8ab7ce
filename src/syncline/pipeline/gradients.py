"""Gradients of a rank's stages after the schedule's backward passes: tied weights are summed, replicas averaged."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.engine.attach import attach
from syncline.engine.launch.units import STEP_KEY
from syncline.engine.sync import Sync
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.layout import Layout, holders
from syncline.pipeline.mesh import Mesh
from syncline.pipeline.stage import Held, hand_over
from syncline.plan.auto_spec import parse_auto


class ReplicaGradients:
    """The engine of this rank's stages, over the ranks that run the same stages in other replicas.

    The last stage that holds a tied weight sums its gradients, lets the engine average the sum, and gives the result
    back to the other holders: so all copies stay equal, whatever a codec does.
    """

    def __init__(
        self,
        blocks: Blocks,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        mesh: Mesh,
        *,
        timeout: float,
        options: Mapping[str, Any],
    ) -> None:
        self._model, self._optimizer, self._shape, self._mesh = blocks.model, optimizer, layout.shape, mesh
        self._timeout, self._options = timeout, options
        self.sync: Sync | None = None
        """None without replicas, and while all parameters of this rank are frozen."""
        parameters = dict(blocks.model.named_parameters())
        held = holders(blocks, layout)
        where = {name: at for name, at in held.items() if name in parameters and mesh.position in at}
        self._tied = {name: (parameters[name], at) for name, at in where.items() if len(at) > 1}
        self._owned = {name: parameters[name] for name, at in where.items() if at[-1] == mesh.position}
        self._buffers = {name: b for name, b in blocks.model.named_buffers() if mesh.position in held[name]}
        self._kept: dict[str, Tensor] = {}
        """Codec state while nothing trains here."""

    def attach(self, codec_state: Mapping[str, Tensor] | None = None, *, step: int = 0) -> None:
        """Attach an engine if there is something to average. The members of the group call it together.

        `step` is the step it starts from: after a reshape, members come from groups with and without an engine.
        """
        if codec_state is not None:
            self._kept = {p: t for p, t in codec_state.items() if p.rpartition(".")[0] in self._owned}
        if self.sync is not None or self._shape.replicas == 1 or not self._trains():
            return
        model = self._model if self._shape.stages == 1 else Held(self._owned, self._buffers)
        # With stages, all gradients are ready at once, after the last pass: no order of launches is worth a search.
        chooses = parse_auto(str(self._options.get("compress"))) is not None
        tune = self._shape.stages == 1 or chooses
        options = {"timeout": self._timeout, "tune": tune, **self._options}
        self.sync = attach(model, self._optimizer, process_group=self._mesh.data, **options)
        if step:
            self.sync.load_state_dict({**self._kept, STEP_KEY: torch.tensor(step)})

    def follow_freeze(self, step: int) -> None:
        """Parameters were frozen or unfrozen: attach or close the engine where all of them are."""
        if not self._trains():
            self._kept = self.detach()
        self.attach(step=step)

    def detach(self) -> dict[str, Tensor]:
        """Close the engine; returns its codec state."""
        if self.sync is None:
            return self._kept
        state = self.sync.state_dict()
        self.sync.close()
        self.sync = None
        return state

    def _trains(self) -> bool:
        return any(p.requires_grad for p in self._owned.values())

    def exchange(self) -> None:
        """Sum and average the local gradients of a step, which all backward passes have left in `grad`."""
        tied = [name for name, (parameter, _) in self._tied.items() if parameter.requires_grad]
        for name in tied:
            self._to_owner(name)
        if self.sync is not None:
            hand_over(list(self._owned.values()))
        for name in tied:
            self._from_owner(name)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients of all stages so that their norm is at most `max_norm`; returns the norm."""
        gradients = [p.grad for p in self._owned.values() if p.grad is not None]
        device = next(self._model.parameters()).device
        square = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in gradients:
            square += torch.linalg.vector_norm(gradient).double().square()
        dist.all_reduce(square, group=self._mesh.pipe)
        norm = square.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in {*self._owned.values(), *(parameter for parameter, _ in self._tied.values())}:
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return norm

    def _to_owner(self, name: str) -> None:
        parameter, (*others, owner) = self._tied[name]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if self._mesh.position != owner:
            dist.send(gradient, group=self._mesh.pipe, group_dst=owner)
            return
        for other in others:
            received = torch.empty_like(gradient)
            dist.recv(received, group=self._mesh.pipe, group_src=other)
            gradient = gradient + received
        parameter.grad = gradient

    def _from_owner(self, name: str) -> None:
        parameter, (*others, owner) = self._tied[name]
        if self._mesh.position != owner:
            received = torch.empty_like(parameter)
            dist.recv(received, group=self._mesh.pipe, group_src=owner)
            parameter.grad = received
            return
        assert parameter.grad is not None
        for other in others:
            dist.send(parameter.grad, group=self._mesh.pipe, group_dst=other)
