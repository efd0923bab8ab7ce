"""`ShardUnit`: the parameters of one `fully_shard` call, this rank's shards of them, and their codec state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from syncline._compat.autograd import in_backward
from syncline.engine.launch.units import Slot, UnitRun, gather_states
from syncline.integrations.buckets import BucketExchange
from syncline.plan import Unit

States = dict[str, dict[str, Tensor]]
"""Codec state by parameter name."""


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard, without autograd."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


class ShardUnit:
    """Averages the gradients of one FSDP2 module; frozen and unused parameters are not sent."""

    def __init__(
        self, name: str, module: nn.Module, parameters: Mapping[str, nn.Parameter], exchange: BucketExchange
    ) -> None:
        self.module, self.parameters = module, dict(parameters)
        self._name, self._exchange = name, exchange
        self._other_states: States = {}
        """Codec state of parameters that were not in the last exchange: frozen or unused ones."""
        self.fired: set[int] = set()
        """The parameters that have a new gradient in this pass, by `id`."""
        self.forwards = 0
        """How often the module ran forward since the last backward pass."""
        self._build(self._trained() or self.parameters)

    def note_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook."""
        if torch.is_grad_enabled() and not in_backward():
            self.forwards += 1

    def fire(self, parameter: Tensor) -> bool:
        """Note a new gradient; returns whether all are there."""
        self.fired.add(id(parameter))
        return len(self.fired) == len(self._trained())

    def launch(self) -> None:
        """Send the gradients. A parameter without one keeps its residual; all replicas must use the same ones."""
        used = {name: p for name, p in self._trained().items() if p.grad is not None}
        if [slot.name for slot in self.run.slots] != list(used):
            states = self.states()
            self._build(used)
            self.load(states)
        self.run.begin()
        self.run.grads = [local_shard(p.grad) for p in used.values() if p.grad is not None]
        self.run.targets = list(self.run.grads)
        self.run.takes_memory = [False] * len(used)
        self._exchange.launch(self.run)

    def wait(self) -> None:
        """Return when the gradients are averaged."""
        self._exchange.wait(self.run)

    def commit(self) -> None:
        """Keep the codec states that the exchange left."""
        for launch in self.run.launches:
            launch.commit()

    def states(self) -> States:
        """The codec state of all parameters."""
        shapes = {slot.name: slot.shape for slot in self.run.slots}
        return self._other_states | gather_states([self.run], shapes)

    def load(self, states: States) -> None:
        """Continue with this codec state."""
        sent = {slot.name for slot in self.run.slots}
        self._other_states = {n: state for n, state in states.items() if n in self.parameters and n not in sent}
        for launch in self.run.launches:
            for batch in launch.batches:
                batch.load(states)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    def _build(self, sent: Mapping[str, nn.Parameter]) -> None:
        slots = [
            Slot(path, local_shard(p), number, local_shard(p))  # type: ignore[arg-type]
            for number, (path, p) in enumerate(sent.items())
        ]
        row = Unit(self._name, tuple(sent), self._exchange.codec.text, self._exchange.pattern)
        self.run = UnitRun(row, slots, self._exchange.links)
        for launch in self.run.launches:
            self._exchange.open(launch.rounds)
