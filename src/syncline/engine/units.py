"""The engine's records of parameters and units: what a plan's row is at run time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from syncline.codecs import build
from syncline.engine.cells import cells_of
from syncline.engine.flow import Launch
from syncline.exchange import Link
from syncline.plan import Unit


@dataclass(eq=False)
class Slot:
    """A parameter: its name, its object, an alias of its memory for updates, and what this backward did to it."""

    name: str
    parameter: nn.Parameter
    index: int
    alias: Tensor
    unit: "UnitRun | None" = None
    fired: bool = False
    grad: Tensor | None = None
    """The object that `parameter.grad` was when its exchange began."""
    hooks: list[Any] = field(default_factory=list)


class UnitRun:
    """A row of the plan at work: its parameters, its launches, and the gradients in flight."""

    def __init__(self, row: Unit, slots: Sequence[Slot], links: dict[str, list[Link]]) -> None:
        self.row, self.slots = row, list(slots)
        self.codec = build(row.codec)
        shapes = [tuple(slot.parameter.shape) for slot in slots]
        names = [slot.name for slot in slots]
        parts = cells_of(self.codec, names, shapes, row.partitions)
        self.launches = [Launch(self, k, cells, links[row.exchange]) for k, cells in enumerate(parts)]
        self.index = min(slot.index for slot in slots)
        self.missing = 0
        self.open_parts = 0
        self.grads: list[Tensor] = []
        self.targets: list[Tensor | None] = []
        self.waiting: list[Any] = []
        """What is to be done once the gradients have arrived, with its promise."""
        self.exchanged: Any = None
        """Promise of the averaged gradients."""
        self.updated: list[Any] = []
        """Promises of the updates, one an optimizer."""
        self.fresh = False
        """Whether an exchange has left states that no step has committed."""
        for slot in slots:
            slot.unit = self

    def again(self) -> "UnitRun":
        """This unit in another plan that has it just so."""
        for slot in self.slots:
            slot.unit = self
        return self

    def begin(self) -> None:
        """A backward pass starts."""
        self.missing, self.open_parts = len(self.slots), len(self.launches)
        self.grads, self.targets, self.waiting = [], [], []
        for slot in self.slots:
            slot.fired = False
        for launch in self.launches:
            launch.ready = launch.done = False

    def drop(self) -> None:
        """Nothing is in flight: let go of gradients that the user may have let go of."""
        self.updated, self.grads, self.targets = [], [], []
        if not self.fresh:
            for slot in self.slots:
                slot.grad = None

    def receive(self, place: int, first: int, values: Tensor) -> None:
        """Averaged values of a parameter's gradient, from `first` on."""
        target = self.targets[place]
        if target is None:
            return
        if values.numel() == target.numel() and target.is_contiguous() and first == 0:
            # No copy: the gradient's object takes the memory over.
            target.data = values.view(target.shape)
        elif target.is_contiguous():
            part = target.view(-1)[first : first + values.numel()]
            if part.data_ptr() != values.data_ptr():
                part.copy_(values.view(-1))
        elif values.numel() == target.numel():
            target.copy_(values.view(target.shape))
        else:
            self._scatter(target, first, values)

    def _scatter(self, target: Tensor, first: int, values: Tensor) -> None:
        """Into a gradient that is not contiguous, in the order of its indices."""
        last = first + values.numel()
        index = torch.arange(first, last, device=target.device)
        target[torch.unravel_index(index, target.shape)] = values.view(-1)
