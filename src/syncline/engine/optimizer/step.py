"""`optimizer.step()` under the engine: it returns at once, and each unit is updated when its gradients have arrived."""

import types
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from syncline._compat import note_step_called, pass_for_step, step_hooks
from syncline.engine.inflight import wait_on_touch
from syncline.engine.inflight.tracker import InFlight
from syncline.engine.launch.units import ParameterUpdate, Slot, UnitRun
from syncline.engine.optimizer.partial_step import Settings, WaitingState, settings, step_part, why_whole
from syncline.engine.protocols import EngineView, Ticket
from syncline.engine.step_state import Phase, StepState
from syncline.errors import UsageError

_REPLACED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
_OWNER = "syncline_engine"
"""The attribute of an adopted optimizer that holds its engine."""


class Stepper:
    """Steps adopted optimizers by parts, or as a whole if something needs all gradients at once.

    Thread: the training thread; the updates themselves run where the executor runs them.
    """

    def __init__(
        self,
        engine: EngineView,
        state: StepState,
        in_flight: InFlight,
        *,
        update: str | None,
        finish_backward: Callable[[], None],
        stepped: Callable[[bool], None],
    ) -> None:
        """`stepped(first)` is called after a step; `first`: no other optimizer has stepped since the backward pass."""
        if update not in (None, "unit", "whole"):
            raise UsageError(f"update is '{update}': use 'unit', 'whole' or None (by the optimizer's kind)")
        self._engine, self._state, self._in_flight, self._update = engine, state, in_flight, update
        self._finish_backward, self._stepped = finish_backward, stepped
        self._originals: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
        self._slots = {id(slot.parameter): slot for slot in engine.slots}

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace an optimizer's `step` and the methods that must wait for updates in flight."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer")
        if getattr(optimizer, _OWNER, None) is not None:
            raise UsageError("this optimizer is attached already: close() the first attachment before attaching again")
        if not self._has_ours(optimizer):
            raise UsageError("the optimizer has none of the model's parameters: build it from model.parameters()")
        why = why_whole(optimizer)
        whole = self._update == "whole" or bool(why and self._update is None)
        if why and self._update is None:
            self._engine.say(f"{why}: every step waits for all gradients")
        self._originals.append((optimizer, {name: optimizer.__dict__.get(name) for name in _REPLACED}))
        original = {name: getattr(optimizer, name) for name in _REPLACED}
        engine, stepper = self._engine, self

        def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            note_step_called(self)
            return stepper.step(self, original["step"], closure, whole=whole)

        def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            stepper.zero_grad(self, original["zero_grad"], set_to_none)

        def waiting(name: str) -> Callable[..., Any]:
            def call(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
                engine.wait()
                result = original[name](*args, **kwargs)
                stepper.guard_state(self)
                return result

            return call

        functions: list[Any] = [step, zero_grad, *(waiting(name) for name in _REPLACED[2:])]
        for name, function in zip(_REPLACED, functions, strict=True):
            function.__name__ = name
            pass_for_step(function, original[name])
            optimizer.__dict__[name] = types.MethodType(function, optimizer)
        setattr(optimizer, _OWNER, engine)
        self.guard_state(optimizer)

    def adopt_unnamed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Adopt an optimizer that is about to step, if it has parameters of this model; True if it was adopted now.

        The step that has begun steps all parameters at once; call `stepped_whole` after it.
        """
        owner = getattr(optimizer, _OWNER, None)
        if owner is self._engine or not self._has_ours(optimizer):
            return False
        if owner is not None:
            raise UsageError("an optimizer holds parameters of two wrapped models: build one optimizer for each model")
        self._engine.wait()
        self.adopt(optimizer)
        return True

    def _has_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._slots for group in optimizer.param_groups for p in group["params"])

    def guard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Make readers of `optimizer.state` wait."""
        if not isinstance(optimizer.state, WaitingState):
            optimizer.state = WaitingState(optimizer.state, self._before_state)

    def _before_state(self) -> None:
        if self._state.in_flight and self._state.phase is not Phase.STEPPING:
            self._engine.wait()

    def restore(self) -> None:
        """Give the optimizers their own methods back."""
        for optimizer, originals in self._originals:
            for name, value in originals.items():
                if value is None:
                    optimizer.__dict__.pop(name, None)
                else:
                    optimizer.__dict__[name] = value
            optimizer.__dict__.pop(_OWNER, None)
            if isinstance(optimizer.state, WaitingState):
                optimizer.state = defaultdict(dict, dict.items(optimizer.state))
        self._originals = []

    def step(self, optimizer: Any, original: Callable[..., Any], closure: Any, *, whole: bool) -> Any:
        """The user's `optimizer.step()`."""
        if closure is not None:
            self._engine.say("a closure evaluates the model inside step: every step waits for all gradients")
            return self._step_with_closure(original, closure)
        self._finish_backward()
        scaled = getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None
        if whole or scaled or not self._state.in_flight:
            return self._step_whole(optimizer, original)
        # torch's own `step` calls these hooks; steps of all parameters at once go through it.
        before, after = step_hooks(optimizer)
        for hook in before:
            hook(optimizer, (optimizer,), {})
        executor = self._engine.executor
        executor.begin_updates(self._engine.units)
        self._state.begin_step()
        try:
            self._hand_over(optimizer)
        except BaseException:
            self._state.abort_step()
            raise
        first = self._state.end_step()
        executor.end_updates()
        self._stepped(first)
        for hook in after:
            hook(optimizer, (optimizer,), {})
        return None

    def _hand_over(self, optimizer: Any) -> None:
        """Give the executor one update per unit of this optimizer."""
        at = settings(optimizer)
        by_unit: dict[UnitRun | None, list[ParameterUpdate]] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                grad = parameter.grad
                if grad is None:
                    continue
                unit = slot.unit if slot is not None else None
                alias = _alias(slot) if slot is not None else parameter.detach()
                by_unit.setdefault(unit, []).append(ParameterUpdate(index, slot, parameter, alias, grad))
        blocking: list[Ticket] = []
        for unit, updates in by_unit.items():
            ticket = self._engine.executor.after(unit, self._update_of(optimizer, at, unit, updates))
            if self._in_flight.add_update(unit, ticket, updates):
                blocking.append(ticket)
        for ticket in blocking:
            ticket.wait()

    def _update_of(
        self, optimizer: Any, at: Settings, unit: UnitRun | None, updates: list[ParameterUpdate]
    ) -> Callable[[], None]:
        """The update of a unit, to run when its gradients are averaged."""
        recorder = self._engine.recorder
        label, step = unit.row.name if unit is not None else "others", recorder.step

        def work() -> None:
            begin = recorder.mark("update")
            if unit is not None:
                unit.commit()
            step_part(optimizer, at, updates)
            recorder.add("update", "update", begin, recorder.mark("update"), unit=label, step=step)

        return work

    def _step_whole(self, optimizer: Any, original: Callable[..., Any]) -> Any:
        self._engine.wait()
        recorder = self._engine.recorder
        begin, step = recorder.mark("update"), recorder.step  # a recording counts the step inside `original`
        result = original()
        recorder.add("update", "update", begin, recorder.mark("update"), unit="all", step=step)
        self.stepped_whole(optimizer)
        return result

    def stepped_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped all its parameters by itself: commit codec states, count the step."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for unit in self._engine.units:
            if any(id(slot.parameter) in mine for slot in unit.slots):
                unit.commit()
        self._stepped(self._state.whole_step())

    def _step_with_closure(self, original: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        engine = self._engine

        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            engine.wait()
            return loss

        engine.wait()
        result = original(averaged)
        for unit in engine.units:
            unit.commit()
        self._stepped(self._state.whole_step())
        return result

    def owes_a_step(self) -> bool:
        """Whether the last exchange left codec states that an optimizer has still to commit; with nothing in flight."""
        held = {id(p) for optimizer, _ in self._originals for group in optimizer.param_groups for p in group["params"]}
        for unit in self._engine.units:
            left = any(state for launch in unit.launches for state in launch.tentative or ())
            # A parameter that no rank used, or that is in no optimizer, will not be stepped.
            if unit.uncommitted and left and any(s.grad is not None and id(s.parameter) in held for s in unit.slots):
                return True
        return False

    def zero_grad(self, optimizer: Any, original: Callable[..., Any], set_to_none: bool) -> None:
        """The user's `optimizer.zero_grad()`, without waiting: a gradient in flight is zeroed behind its update."""
        self._finish_backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        updated = set(self._in_flight.updates)
        later = [] if set_to_none or self._state.phase is not Phase.UPDATING else self._zero_in_flight(parameters)
        for p, _ in later:
            p.grad = None
        original(set_to_none=set_to_none)
        for p, grad in later:
            p.grad = grad
        for p in parameters:
            slot = self._slots.get(id(p))
            if slot is not None and slot.unit is not None and slot.unit not in updated:
                slot.unit.uncommitted = False

    def _zero_in_flight(self, parameters: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Zero marked gradients when their averages and updates are done; returns them with their parameters."""
        by_unit: dict[UnitRun | None, list[tuple[Tensor, Tensor]]] = {}
        for p in parameters:
            grad, slot = p.grad, self._slots.get(id(p))
            if grad is not None and wait_on_touch.is_marked(grad) and grad.grad_fn is None:
                by_unit.setdefault(slot.unit if slot is not None else None, []).append((p, grad))
        self._engine.executor.begin_updates(self._engine.units)
        for unit, pairs in by_unit.items():
            grads = [grad for _, grad in pairs]
            ticket = self._engine.executor.after(unit, partial(_zero, grads))
            self._in_flight.add_zeroing(ticket, grads)
        return [pair for pairs in by_unit.values() for pair in pairs]


def _zero(grads: list[Tensor]) -> None:
    for grad in grads:
        grad.zero_()


def _alias(slot: Slot) -> Tensor:
    if slot.alias.data_ptr() != slot.parameter.data_ptr() or slot.alias.shape != slot.parameter.shape:
        slot.alias = slot.parameter.detach()  # the user gave the parameter other memory
    return slot.alias
