"""The optimizer's side: `step()` returns at once, and each unit is updated when its gradients have arrived."""

import types
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline._compat import global_step_hooks
from syncline.engine.inflight import tickets as pending
from syncline.engine.launch.units import Slot, UnitRun
from syncline.engine.optimizer import partial_step as byparts
from syncline.engine.optimizer.partial_step import Member, WaitingState
from syncline.errors import UsageError

if TYPE_CHECKING:
    from syncline.engine.sync import Sync

# The parameter, our alias of it, and nobody else.
_KNOWN_USERS = 2
_PATCHED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


class Stepper:
    """Steps adopted optimizers by parts, or as a whole where something looks at all gradients at once."""

    def __init__(self, sync: "Sync", update: str | None) -> None:
        if update not in (None, "unit", "whole"):
            raise UsageError(f"update is '{update}': use 'unit', 'whole' or None (by the optimizer's kind)")
        self._sync, self._update = sync, update
        self._originals: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
        self._slots: dict[int, Slot] = {}
        self._rest: list[Any] = []
        self._strays: list[Tensor] = []

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer's `step`."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer")
        if getattr(optimizer, "_syncline", None) is not None:
            raise UsageError("this optimizer is attached already: close() the first attachment before attaching again")
        self._slots = {id(slot.parameter): slot for slot in self._sync.slots}
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._slots]
        if not mine:
            raise UsageError("the optimizer has none of the model's parameters: build it from model.parameters()")
        why = byparts.steps_by_parts(optimizer)
        whole = self._update == "whole" or bool(why and self._update is None)
        if why and self._update is None:
            self._sync.say(f"{why}: every step waits for all gradients")
        self._originals.append((optimizer, {name: optimizer.__dict__.get(name) for name in _PATCHED}))
        original = {name: getattr(optimizer, name) for name in _PATCHED}
        sync, stepper = self._sync, self

        def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            self._opt_called = True  # type: ignore[attr-defined]
            return stepper.step(self, original["step"], closure, whole=whole)

        def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            stepper.zero_grad(self, original["zero_grad"], set_to_none)

        def settled(name: str) -> Callable[..., Any]:
            def call(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
                sync.wait()
                result = original[name](*args, **kwargs)
                stepper.guard_state(self)
                return result

            return call

        patched: dict[str, Any] = {
            "step": step,
            "zero_grad": zero_grad,
            **{name: settled(name) for name in _PATCHED[2:]},
        }
        for name, function in patched.items():
            function.__name__ = name
            if hasattr(original[name], "_wrapped_by_lr_sched"):
                function._wrapped_by_lr_sched = True  # else the scheduler complains
            optimizer.__dict__[name] = types.MethodType(function, optimizer)
        optimizer._syncline = sync  # type: ignore[attr-defined]
        self.guard_state(optimizer)

    def guard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Let readers of `optimizer.state` wait."""
        if not isinstance(optimizer.state, WaitingState):
            optimizer.state = WaitingState(optimizer.state, self._before_state)

    def restore(self) -> None:
        """Give the optimizers their own methods back."""
        for optimizer, originals in self._originals:
            for name, value in originals.items():
                if value is None:
                    optimizer.__dict__.pop(name, None)
                else:
                    optimizer.__dict__[name] = value
            optimizer.__dict__.pop("_syncline", None)
            if isinstance(optimizer.state, WaitingState):
                optimizer.state = defaultdict(dict, dict.items(optimizer.state))
        self._originals = []
        self._let_strays_go()

    def wait(self) -> None:
        """Return when what is no unit's has been done."""
        for promise in self._rest:
            promise.wait()
        self._rest = []
        self._let_strays_go()

    def _let_strays_go(self) -> None:
        """What the optimizer has and the model has not is marked, too, and nobody else remembers it."""
        for tensor in self._strays:
            pending.release(tensor)
        self._strays = []

    def _before_state(self) -> None:
        if self._sync._outstanding and not self._sync._stepping:
            self._sync.wait()

    def step(self, optimizer: Any, original: Callable[..., Any], closure: Any, *, whole: bool) -> Any:
        """The user's `optimizer.step()`."""
        sync = self._sync
        if closure is not None:
            sync.say("a closure evaluates the model inside step: every step waits for all gradients")
            return self._with_closure(optimizer, original, closure)
        sync._finish_backward()
        if whole or not sync._outstanding or getattr(optimizer, "found_inf", None) is not None:
            return self._whole(optimizer, original)
        if getattr(optimizer, "grad_scale", None) is not None:
            return self._whole(optimizer, original)
        # As torch's own `step` has them; whole steps go through that.
        before, after = global_step_hooks()
        for hook in [*before, *optimizer._optimizer_step_pre_hooks.values()]:
            hook(optimizer, (optimizer,), {})
        if sync._profile is not None:
            sync._settle_gradients()
            sync._profile.updates_begin()
        sync._stepping = True
        try:
            self._by_parts(optimizer)
        finally:
            sync._stepping = False
        if sync._profile is not None:
            sync._profile.updates_issued()
            sync.wait()
            sync._profile.updates_done()
        sync._stepped()
        for hook in [*optimizer._optimizer_step_post_hooks.values(), *after]:
            hook(optimizer, (optimizer,), {})
        return None

    def found(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer that nobody named is about to step: True if it is this model's and now adopted.

        The step that has begun is a whole one; call `stepped_whole` when it is done.
        """
        sync = self._sync
        owner = getattr(optimizer, "_syncline", None)
        if owner is sync:
            return False
        known = {id(slot.parameter) for slot in sync.slots}
        if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            return False
        if owner is not None:
            raise UsageError("an optimizer holds parameters of two wrapped models: build one optimizer for each model")
        sync.wait()
        self.adopt(optimizer)
        return True

    def stepped_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped all its parameters by itself: keep the states, count the step."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for unit in self._sync.units:
            if any(id(slot.parameter) in mine for slot in unit.slots):
                self._commit(unit)
        self._sync._stepped()

    def _whole(self, optimizer: Any, original: Callable[..., Any]) -> Any:
        sync = self._sync
        sync.wait()
        recorder = sync.recorder
        begin, step = recorder.mark("update"), recorder.step  # a recording counts the step as soon as it was taken
        result = original()
        recorder.add("update", "update", begin, recorder.mark("update"), unit="all", step=step)
        self.stepped_whole(optimizer)
        return result

    def _with_closure(self, optimizer: Any, original: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        sync = self._sync

        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            sync.wait()
            return loss

        sync.wait()
        result = original(averaged)
        for unit in sync.units:
            self._commit(unit)
        sync._stepped()
        return result

    def _by_parts(self, optimizer: Any) -> None:
        self._sync.executor.fence()
        at = byparts.settings(optimizer)
        by_unit: dict[UnitRun | None, list[tuple[Slot | None, Member]]] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                grad = parameter.grad
                unit = slot.unit if slot is not None else None
                if grad is None:
                    continue
                alias = self._alias(slot) if slot is not None else parameter.detach()
                by_unit.setdefault(unit, []).append((slot, Member(index, parameter, alias, grad)))
        aliased: list[Any] = []
        profile = self._sync._profile
        for unit, entries in by_unit.items():
            with nullcontext() if profile is None else profile.issuing_update():
                promise = self._schedule(optimizer, at, unit, [member for _, member in entries])
            shared = False
            for slot, member in entries:
                # In the order of the plain loop: an older graph over this parameter is out of date from now on.
                torch.autograd.graph.increment_version(member.parameter)
                fits = pending.mark(member.parameter, promise) and pending.mark(member.grad, promise)
                shared = shared or not fits or pending.shares_memory(member.alias, _KNOWN_USERS)
                if slot is None:
                    self._strays += [member.parameter, member.grad]
                    continue
                if slot.grad is not None and slot.grad is not member.grad:
                    pending.release(slot.grad)
                slot.grad = member.grad
            if shared:
                aliased.append(promise)
        for promise in aliased:
            promise.wait()

    def _schedule(self, optimizer: Any, at: byparts.Settings, unit: UnitRun | None, members: list[Member]) -> Any:
        sync = self._sync
        label = unit.row.name if unit is not None else "others"
        step = sync.recorder.step

        def work() -> None:
            begin = sync.recorder.mark("update")
            if unit is not None:
                self._commit(unit)
            byparts.update(optimizer, at, members)
            sync.recorder.add("update", "update", begin, sync.recorder.mark("update"), unit=label, step=step)

        promise = sync.executor.after(unit, work)
        if unit is not None:
            unit.updated.append(promise)
        else:
            self._rest.append(promise)
        return promise

    def _alias(self, slot: Slot) -> Tensor:
        if slot.alias.data_ptr() != slot.parameter.data_ptr() or slot.alias.shape != slot.parameter.shape:
            slot.alias = slot.parameter.detach()  # the user gave the parameter other memory
        return slot.alias

    def owes_a_step(self) -> bool:
        """Whether the last exchange has left states that an optimizer is still to commit; with nothing in flight."""
        held = {id(p) for optimizer, _ in self._originals for group in optimizer.param_groups for p in group["params"]}
        for unit in self._sync.units:
            left = any(state for launch in unit.launches for state in launch.tentative or ())
            # A parameter that no rank has used, or that is in no optimizer, will not be stepped.
            if unit.fresh and left and any(s.grad is not None and id(s.parameter) in held for s in unit.slots):
                return True
        return False

    def _commit(self, unit: UnitRun) -> None:
        if unit.fresh:
            unit.fresh = False
            for launch in unit.launches:
                launch.commit()

    def zero_grad(self, optimizer: Any, original: Callable[..., Any], set_to_none: bool) -> None:
        """As the optimizer's, without waiting: a gradient in flight is replaced, not overwritten."""
        sync = self._sync
        sync._finish_backward()
        if not set_to_none and sync._outstanding:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None and pending.is_pending(p.grad):
                        p.grad = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        original(set_to_none=set_to_none)
        for group in optimizer.param_groups:
            for p in group["params"]:
                slot = self._slots.get(id(p))
                if slot is not None and slot.unit is not None and not slot.unit.updated:
                    slot.unit.fresh = False
