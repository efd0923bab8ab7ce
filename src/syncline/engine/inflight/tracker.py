"""The one owner of all that is in flight: exchanges, updates, buffers, and the tensors that are marked for them."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from syncline.engine.inflight import wait_on_touch
from syncline.engine.launch.units import ParameterUpdate, Slot, UnitRun
from syncline.engine.protocols import EngineView, Ticket
from syncline.engine.step_state import StepState

_KNOWN_USERS = 2
"""Users of a parameter's memory that we know: the parameter and our alias."""
_NO_GUARD = "a tensor's class has its own __torch_function__, so that its readers cannot wait: steps wait for it"


class Arrival(Protocol):
    """Something on its way that no tensor is marked for."""

    def wait(self) -> None:
        """Return when it is there."""


class InFlight:
    """Knows what is in flight, waits for it, and restores the marked tensors.

    Thread: the training thread calls all methods (autograd's thread, while `backward` blocks it). Lock: none here.
    Other threads see marked tensors only, through the table in `wait_on_touch.py`, which has its own lock.
    """

    def __init__(self, engine: EngineView, state: StepState) -> None:
        self._engine, self._state = engine, state
        self.updates: dict[UnitRun | None, list[Ticket]] = {}
        """Tickets of updates by unit, one per optimizer; None: parameters that are not the model's."""
        self._arrivals: list[Arrival] = []
        self._other_tensors: list[Tensor] = []
        """Marked tensors that are no slot's: buffers, and what an optimizer has and the model does not."""
        self._touches_observed = False

    @property
    def marked(self) -> bool:
        """Whether tensors may be marked, so that compiled code must not read them."""
        return self._state.in_flight or self._touches_observed or bool(self._arrivals)

    def add_gradients(self, unit: UnitRun, ticket: Ticket) -> None:
        """A unit's gradients are about to be exchanged: their touches wait."""
        if wait_on_touch.mark_all([grad for grad in unit.targets if grad is not None], ticket):
            self._engine.say(_NO_GUARD)
            unit.shared_memory = True

    def add_update(self, unit: UnitRun | None, ticket: Ticket, updates: Sequence[ParameterUpdate]) -> bool:
        """Parameters are about to be updated: touches of them and their gradients wait.

        True if somebody can read one of them without a touch that waits: the caller must wait then.
        """
        self.updates.setdefault(unit, []).append(ticket)
        must_wait = _gradients_are_shared(unit, updates)
        parameters = [update.parameter for update in updates]
        # As in the plain loop: a graph that was built over the old values is out of date from now on.
        torch.autograd.graph.increment_version(parameters)
        if wait_on_touch.mark_all([*parameters, *(update.grad for update in updates)], ticket):
            self._engine.say(_NO_GUARD)
            must_wait = True
        for update in updates:
            must_wait = must_wait or wait_on_touch.shares_memory(update.alias, _KNOWN_USERS)
            slot = update.slot
            if slot is None:
                self._other_tensors += [update.parameter, update.grad]
                continue
            if slot.grad is not None and slot.grad is not update.grad:
                wait_on_touch.release(slot.grad)
            slot.grad = update.grad
        return must_wait

    def add_buffers(self, buffers: Sequence[Tensor], ticket: Ticket) -> None:
        """Buffers are being received: their touches wait."""
        self._arrivals.append(ticket)
        refused = wait_on_touch.mark_all(buffers, ticket)
        self._other_tensors += buffers
        if refused:
            self._engine.say(_NO_GUARD)
            ticket.wait()

    def add_zeroing(self, ticket: Ticket, grads: Sequence[Tensor]) -> None:
        """Gradients will be zeroed behind their updates: touches wait for that, too."""
        self._arrivals.append(ticket)
        if wait_on_touch.mark_all(grads, ticket):
            ticket.wait()
        self._other_tensors += grads

    def add_arrival(self, arrival: Arrival) -> None:
        """Something is on its way that `settle` must wait for."""
        self._arrivals.append(arrival)

    def observe_touches(self, slots: Sequence[Slot], each: Sequence[Ticket]) -> None:
        """Mark every parameter with its ticket, although nothing is in flight (profiling)."""
        self._touches_observed = True
        for slot, ticket in zip(slots, each, strict=True):
            wait_on_touch.mark(slot.parameter, ticket)

    def settle(self) -> None:
        """Wait for all that is in flight, and restore every marked tensor."""
        executor = self._engine.executor
        for unit in self._engine.units:
            exchanged = executor.exchanged(unit)
            if exchanged is not None:
                exchanged.wait()
        for updates in self.updates.values():
            for ticket in updates:
                ticket.wait()
        for arrival in self._arrivals:
            arrival.wait()
        self.release()
        for unit in self._engine.units:
            unit.forget_gradients()
        self.updates, self._arrivals = {}, []
        self._state.settle()

    def release(self) -> None:
        """Restore every marked tensor without waiting."""
        slots = self._engine.slots
        tensors = [*(slot.parameter for slot in slots), *(slot.grad for slot in slots), *self._other_tensors]
        wait_on_touch.release_all(tensors)
        self._other_tensors = []
        self._touches_observed = False


def _gradients_are_shared(unit: UnitRun | None, updates: Sequence[ParameterUpdate]) -> bool:
    """Whether somebody can write to a gradient of these without a touch that waits, while the update reads it."""
    if unit is None:
        return any(wait_on_touch.shares_memory(update.grad, 1) for update in updates)
    if unit.shared_memory:
        return True
    # A view of a gradient in flight cannot be made without a touch, nor without a new object.
    seen = unit.touched or any(update.slot is not None and update.grad is not update.slot.grad for update in updates)
    return seen and unit.has_unknown_views()
