"""`optimizer.step()` under the engine: it returns at once, and each unit is updated when its gradients have arrived."""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from syncline._compat.autograd import in_backward
from syncline._compat.optimizers import note_step_called, step_hooks
from syncline._compat.tensors import NoSubclasses
from syncline.engine.inflight import wait_on_touch
from syncline.engine.inflight.tracker import InFlight
from syncline.engine.launch.units import ParameterUpdate, Slot, UnitRun
from syncline.engine.optimizer.adoption import Adopted, adopted, replace_closure
from syncline.engine.optimizer.partial_step import Settings, settings, step_part, stepping_as_lists, why_whole
from syncline.engine.optimizer.waiting_state import WaitingState, is_held_by_others
from syncline.engine.other_wrappers import refuse_horovod
from syncline.engine.protocols import EngineView, Ticket
from syncline.engine.step_state import Phase, StepState
from syncline.errors import UsageError

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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
        check_model: Callable[[], None],
        finish_backward: Callable[[], None],
        before_step: Callable[[], None],
        dropped: Callable[[Sequence[UnitRun]], None],
        stepped: Callable[[bool], None],
    ) -> None:
        """`stepped(first)` is called after a step; `first`: no other optimizer has stepped since the backward pass.

        `dropped(units)` is called before gradients are zeroed with which no optimizer has stepped. `check_model` raises
        if the model has other parameters now; `before_step` ends the backward pass.
        """
        if update not in (None, "unit", "whole"):
            raise UsageError(f"update is '{update}': use 'unit', 'whole' or None (by the optimizer's kind)")
        self._engine, self._state, self._in_flight, self._update = engine, state, in_flight, update
        self.check_model, self._finish_backward = check_model, finish_backward
        self._before_step, self._dropped, self._stepped = before_step, dropped, stepped
        self._adopted: weakref.WeakSet[Adopted] = weakref.WeakSet()
        self._slots = {id(slot.parameter): slot for slot in engine.slots}
        self._guards = True
        self._recent: deque[Settings] = deque(maxlen=8)
        """The settings of the last steps."""
        self.stepping: torch.optim.Optimizer | None = None
        """The adopted optimizer that steps now."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace an optimizer's `step` and the methods that must wait for updates in flight."""
        refuse_horovod(optimizer)
        owner = adopted(optimizer)
        if owner is not None and owner in self._adopted:
            raise UsageError("the same optimizer was given twice: give each one once")
        if owner is not None:
            owner.shared = True  # its own engine steps it, and this one notices (find_optimizers.py)
            return
        why = why_whole(optimizer)
        whole = self._update == "whole" or bool(why and self._update is None)
        if why and self._update is None:
            self._engine.say(f"{why}: every step waits for all gradients")
        self._adopted.add(Adopted(optimizer, self, whole=whole))
        self.guard_state(optimizer)

    def has_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has parameters of this engine's model."""
        return any(id(p) in self._slots for group in optimizer.param_groups for p in group["params"])

    def learning_rate(self) -> float:
        """The largest learning rate of the adopted optimizers; 0 if there is none.

        One that is a tensor on a GPU is left out: to read it would be to wait for it.
        """
        groups = [group for each in self._adopted for group in each.optimizer.param_groups]
        rates = [group["lr"] for group in groups if "lr" in group]
        return max((float(rate) for rate in rates if not (isinstance(rate, Tensor) and rate.is_cuda)), default=0.0)

    def guard_state(self, optimizer: torch.optim.Optimizer) -> WaitingState | None:
        """Make readers of `optimizer.state` wait; None if the user has put a dict there that must stay what it is.

        None as well while nothing can be in flight.
        """
        if not self._guards:
            return None
        if isinstance(optimizer.state, WaitingState):
            return optimizer.state
        if type(optimizer.state) not in (dict, defaultdict) or is_held_by_others(optimizer.__dict__, "state"):
            self._engine.say("optimizer.state is a dict of yours: every step waits for its updates")
            return None
        guarded = WaitingState(optimizer.state, self._before_state)
        optimizer.state = guarded
        return guarded

    def _before_state(self) -> None:
        if self._state.in_flight and self._state.phase is not Phase.STEPPING:
            self._engine.wait()

    def guard_states(self, guards: bool) -> None:
        """Whether `optimizer.state` waits. With torch's reducer nothing is in flight: it is torch's own dict then."""
        self._guards = guards
        for each in list(self._adopted):
            if guards:
                self.guard_state(each.optimizer)
            else:
                _leave_state(each.optimizer)

    def restore(self) -> None:
        """Give the optimizers their own methods back."""
        for each in list(self._adopted):
            each.restore()
            _leave_state(each.optimizer)
        self._adopted.clear()

    def step(self, adopted: Adopted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's `optimizer.step(...)`."""
        self.check_not_in_backward(adopted.optimizer)
        note_step_called(adopted.optimizer)
        self.stepping = adopted.optimizer
        try:
            return self._step(adopted, args, kwargs)
        finally:
            self.stepping = None

    def _step(self, adopted: Adopted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer: Any = adopted.optimizer
        if (with_closure := replace_closure(args, kwargs, self._averaging)) is not None:
            self._engine.say("a closure evaluates the model inside step: every step waits for all gradients")
            return self._step_with_closure(adopted, with_closure)
        self._before_step()
        if not self._state.in_flight:
            self.check_model()  # no gradient has come since the last step
        state = self.guard_state(optimizer)
        scaled = getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None
        if adopted.whole or scaled or state is None or not self._state.in_flight:
            return self._step_whole(adopted, (args, kwargs))
        # torch's own `step` calls these hooks; steps of all parameters at once go through it.
        before, after = step_hooks(optimizer)
        for hook in before:
            changed = hook(optimizer, (optimizer, *args), kwargs)
            if changed is not None:
                (_, *args), kwargs = changed
        executor = self._engine.executor
        # On a GPU, copies of settings come before the updates that read them, and stay until those are done.
        self._recent.append(settings(optimizer))
        executor.begin_updates(self._engine.units)
        settled = self._state.phase is not Phase.UPDATING
        self._state.begin_step()
        try:
            self._hand_over(adopted, state, (args, kwargs), settled=settled)
        except BaseException:
            self._state.abort_step()
            raise
        first = self._state.end_step()
        executor.end_updates()
        self._stepped(first)
        for hook in after:
            hook(optimizer, (optimizer, *args), kwargs)
        return None

    def check_not_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that steps inside a backward pass would take gradients of this rank only."""
        if self._state.phase is Phase.BACKWARD and in_backward():
            raise UsageError(
                f"this {type(optimizer).__name__} steps inside the backward pass, where gradients are not averaged yet:"
                " step after backward() has returned (the engine overlaps updates with the exchange itself)"
            )

    def _hand_over(self, adopted: Adopted, state: WaitingState, arguments: _Arguments, *, settled: bool) -> None:
        """Give the executor one update per unit of this optimizer."""
        optimizer = adopted.optimizer
        at = self._recent[-1]
        by_unit: dict[UnitRun | None, list[ParameterUpdate]] = {}
        held: set[UnitRun | None] = {None} if adopted.shared else set()
        parameters = [(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
        parameters = [(i, p) for i, p in parameters if p.grad is not None]
        state.begin_step([p for _, p in parameters], settled=settled)
        for index, parameter in parameters:
            slot = self._slots.get(id(parameter))
            unit = slot.unit if slot is not None else None
            alias = _alias(slot) if slot is not None else parameter.detach()
            by_unit.setdefault(unit, []).append(ParameterUpdate(index, slot, parameter, alias, parameter.grad))
            if state.was_used and unit not in held and state.is_held(parameter):
                self._engine.say("your code holds tensors of optimizer.state: every step waits for their updates")
                held.add(unit)
        state.was_used = state.was_used and bool(held)
        blocking: list[Ticket] = []
        for unit, updates in by_unit.items():
            ticket = self._engine.executor.after(unit, self._update_of(optimizer, state, at, unit, updates, arguments))
            if self._in_flight.add_update(unit, ticket, updates) or unit in held:
                blocking.append(ticket)
        for ticket in blocking:
            ticket.wait()

    def _update_of(
        self,
        optimizer: Any,
        state: WaitingState,
        at: Settings,
        unit: UnitRun | None,
        updates: list[ParameterUpdate],
        arguments: _Arguments,
    ) -> Callable[[], None]:
        """The update of a unit, to run when its gradients are averaged."""
        recorder = self._engine.recorder
        label, step = unit.row.name if unit is not None else "others", recorder.step
        edited = unit.edited_gradients() if unit is not None else []

        def work() -> None:
            begin = recorder.mark("update")
            if unit is not None:
                unit.commit(edited)
            step_part(optimizer, state, at, updates, arguments)
            recorder.add("update", "update", begin, recorder.mark("update"), unit=label, step=step)

        return work

    def _step_whole(self, adopted: Adopted, arguments: _Arguments) -> Any:
        self._engine.wait()
        recorder = self._engine.recorder
        begin, step = recorder.mark("update"), recorder.step  # a recording counts the step inside the original
        args, kwargs = arguments
        broken = getattr(adopted.optimizer, "found_inf", None)
        with stepping_as_lists(adopted.optimizer, adopted.groups_of_small()):
            result = adopted.original["step"](*args, **kwargs)
        recorder.add("update", "update", begin, recorder.mark("update"), unit="all", step=step)
        self.stepped_whole(adopted.optimizer, broken=broken)
        return result

    def stepped_whole(self, optimizer: torch.optim.Optimizer, *, broken: Any = None) -> None:
        """An optimizer has stepped all its parameters by itself: commit codec states, count the step.

        `broken`: a tensor that is not zero if GradScaler has found a gradient that is not finite.
        """
        uncommitted = [unit for unit in self._engine.units if unit.uncommitted]
        if uncommitted:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for unit in uncommitted:
                if any(id(slot.parameter) in mine for slot in unit.slots):
                    unit.commit(unit.edited_gradients(), broken=broken)
        self._stepped(self._state.whole_step())

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with averaged gradients after it."""

        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._engine.wait()
            return loss

        return averaged

    def _step_with_closure(self, adopted: Adopted, arguments: _Arguments) -> Any:
        self._engine.wait()
        args, kwargs = arguments
        for unit in self._engine.units:
            unit.optimizer_steps()  # the closure is called again after the optimizer has changed parameters
        result = adopted.original["step"](*args, **kwargs)
        for unit in self._engine.units:
            unit.commit()
        self._stepped(self._state.whole_step())
        return result

    def wait_then_call(self, adopted: Adopted, name: str, *args: Any, **kwargs: Any) -> Any:
        """The user's `optimizer.state_dict()` and the like."""
        self._engine.wait()
        result = adopted.original[name](*args, **kwargs)
        self.guard_state(adopted.optimizer)
        return result

    def owes_a_step(self) -> bool:
        """Whether the last exchange left codec states that an optimizer has still to commit; with nothing in flight."""
        optimizers = [each.optimizer for each in self._adopted]
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        for unit in self._engine.units:
            left = any(state for launch in unit.launches for state in launch.tentative or ())
            # A parameter that no rank used, or that is in no optimizer, will not be stepped.
            if unit.uncommitted and left and any(s.grad is not None and id(s.parameter) in held for s in unit.slots):
                return True
        return False

    def zero_grad(self, adopted: Adopted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The user's `optimizer.zero_grad()`, without waiting: a gradient in flight is zeroed behind its update."""
        self._finish_backward()
        if not self._state.in_flight and not any(unit.uncommitted for unit in self._engine.units):
            adopted.original["zero_grad"](*args, **kwargs)
            return
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        parameters = [p for group in adopted.optimizer.param_groups for p in group["params"]]
        slots = [slot for p in parameters if (slot := self._slots.get(id(p))) is not None]
        units = dict.fromkeys(slot.unit for slot in slots if slot.unit is not None and slot.unit.uncommitted)
        self._dropped([unit for unit in units if unit not in self._in_flight.updates])
        later = [] if set_to_none or self._state.phase is not Phase.UPDATING else self._zero_in_flight(parameters)
        for p, _ in later:
            p.grad = None
        # torch's own reads no value if it drops the gradients: tensors in flight need not be asked.
        own = set_to_none and type(adopted.optimizer).zero_grad is torch.optim.Optimizer.zero_grad
        with NoSubclasses() if own else nullcontext():
            adopted.original["zero_grad"](*args, **kwargs)
        for p, grad in later:
            p.grad = grad

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


def _leave_state(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer.state, WaitingState):
        optimizer.state.stop_waiting()
        if not is_held_by_others(optimizer.__dict__, "state"):
            optimizer.state = optimizer.state.plain()


def _alias(slot: Slot) -> Tensor:
    if slot.alias.data_ptr() != slot.parameter.data_ptr() or slot.alias.shape != slot.parameter.shape:
        slot.alias = slot.parameter.detach()  # the user gave the parameter other memory
    return slot.alias
