"""The engine's records of parameters and units: what a plan's row is at run time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from syncline._compat import storage_users
from syncline.codecs import build
from syncline.engine.launch.batches import Cell, States, Where, cells_of, rounds_of
from syncline.engine.launch.bf16_buffers import Rounded
from syncline.errors import UsageError
from syncline.exchange import Link
from syncline.plan import Unit

if TYPE_CHECKING:
    from syncline.engine.sync import Sync


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


@dataclass(eq=False)
class Launch:
    """One part of a unit, and what it is doing in the present backward pass."""

    unit: "UnitRun"
    part: int
    cells: Sequence[Cell]
    links: Sequence[Link]
    """One a round: rounds have process groups of their own, so that no round's order depends on another's."""
    position: int = 0
    ready: bool = False
    where: Where = field(default_factory=lambda: Where(0, 0, 1, 0))
    step: int = -1
    """The recorder's step when the backward pass began; a worker may come to it in the next one."""
    tentative: list[dict[str, Tensor]] | None = None
    """The states that the last exchange would leave; committed by the optimizer's step."""
    chain: bool = False
    """Go on from the tentative states: gradients are being accumulated over several exchanges."""
    done: bool = False
    event: Any = None
    measure: bool = False
    """Note this pass's norms, for the sentinel."""
    norms: Tensor | None = None
    """Norms of this rank's gradient and of the averaged one, as they were exchanged."""
    rounded: Rounded = field(default_factory=Rounded)

    def __post_init__(self) -> None:
        self.rounds, self.always = rounds_of(self.cells)
        name = self.unit.row.name
        self.label = f"{name}[{self.part}]" if self.unit.row.partitions > 1 else name

    def commit(self) -> None:
        """Keep what the exchange left."""
        if self.tentative is not None:
            for cell, state in zip(self.cells, self.tentative, strict=True):
                cell.state = state
            self.tentative = None


class UnitRun:
    """A row of the plan at work: its parameters, its launches, and the gradients in flight."""

    def __init__(self, row: Unit, slots: Sequence[Slot], links: Mapping[str, list[Link]]) -> None:
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

    def again(self, links: Mapping[str, list[Link]]) -> "UnitRun":
        """This unit in another plan that has it just so."""
        for slot in self.slots:
            slot.unit = self
        for launch in self.launches:
            launch.links = links[self.row.exchange]
        return self

    def begin(self) -> None:
        """A backward pass starts."""
        self.missing, self.open_parts = len(self.slots), len(self.launches)
        self.grads, self.targets, self.waiting = [], [], []
        for slot in self.slots:
            slot.fired = False
        for launch in self.launches:
            launch.ready = launch.done = False

    def collect(self) -> None:
        """The gradients are complete: take them as they are."""
        again = self.fresh
        for slot in self.slots:
            grad = slot.parameter.grad
            if grad is None:
                # Unused on all ranks: nothing of it is kept, but every rank sends the same.
                self.grads.append(torch.zeros_like(slot.alias))
                self.targets.append(None)
                continue
            if grad.layout != torch.strided:
                raise UsageError(f"the gradient of '{slot.name}' is sparse: build its embedding with sparse=False")
            if storage_users(grad) > 1:
                # Autograd may give one memory to several gradients, or read it once more; ours is overwritten.
                grad.data = grad.detach().clone()
            again = again and grad is slot.grad
            slot.grad = grad
            self.grads.append(grad.detach())
            self.targets.append(grad)
        for launch in self.launches:
            launch.chain = again
        self.fresh = True

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


def units_of(
    rows: Sequence[Unit], slots: Sequence[Slot], links: Mapping[str, list[Link]], states: States, *,
    before: Sequence[UnitRun],
) -> list[UnitRun]:  # fmt: skip
    """The units of the parameters that train now, with their state.

    A unit of `before` that stays as it is keeps what its last exchange left until a step commits it.
    """
    by_name, old = {slot.name: slot for slot in slots}, {unit.row: unit for unit in before}
    for slot in slots:
        slot.unit = None
    units = []
    for row in rows:
        mine = [by_name[name] for name in row.parameters if by_name[name].parameter.requires_grad]
        if not mine:
            continue
        if row in old and old[row].slots == mine:
            units.append(old[row].again(links))
            continue
        units.append(UnitRun(row, mine, links))
        for launch in units[-1].launches:
            for cell in launch.cells:
                cell.load(states)
    return units


class Exchanged:
    """The ticket of a unit's gradients between backward and step."""

    marked: list[Tensor] | None = None

    def __init__(self, sync: "Sync", unit: UnitRun) -> None:
        self._sync, self._unit = sync, unit

    def wait(self) -> None:
        """Wait for the unit's exchange."""
        self._sync._gradient_touched()
        self._unit.exchanged.wait()

    def done(self) -> bool:
        """Whether the averaged gradient is there."""
        done: bool = self._unit.exchanged.done()
        return done
