"""The engine: gradients leave as they become ready, parameters are updated as they come back, touches wait.

A step, as the engine sees it:

    a parameter's gradient is accumulated     its unit counts down
    a unit is complete                        its launches may go, in the plan's order
    backward ends                             who did not take part is found out; buffers are sent
    p.grad is touched                         wait for that unit's exchange
    optimizer.step()                          states are committed; each unit is updated as its gradients arrive
    a parameter is touched                    wait for its update
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from syncline import exchange
from syncline._compat import after_backward, in_nested_backward
from syncline.engine.health.errors import PeerMonitor
from syncline.engine.health.sentinel import Sentinel
from syncline.engine.inflight import tickets as pending
from syncline.engine.inflight.buffers import send
from syncline.engine.inflight.compiled import Compiled
from syncline.engine.inflight.unused import Usage
from syncline.engine.launch.batches import Where
from syncline.engine.launch.units import Exchanged, Slot, UnitRun, units_of
from syncline.engine.optimizer.step import Stepper
from syncline.engine.process_groups import Groups, parent_group, timeout_of
from syncline.engine.protocols import StepObserver, Ticket
from syncline.engine.setup import agree, first_plan, make_executor, one_device, rounds_in
from syncline.engine.shutdown import close_at_exit, forget
from syncline.engine.state import States, flat_state, gathered, read_state
from syncline.engine.tuning.choose import allowed_codecs
from syncline.engine.tuning.tuner import Tuner
from syncline.errors import UsageError
from syncline.plan import Plan, Shape
from syncline.trace import Recorder
from syncline.trace.record.recorder import process_recorder

_log = logging.getLogger("syncline")


class Sync:
    """What `attach` returns: the engine of one model. `wait`, `no_sync`, `state_dict` and `close` are for you."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        compress: str | None,
        plan: Plan | str | Path | None,
        exchange: str | None,
        process_group: Any,
        buffers: bool,
        update: str | None,
        timeout: float | None,
        sentinel: int,
        recorder: Recorder | None,
        seed: int,
        workers: int,
        tune: bool,
    ) -> None:
        self.model = model
        parent = parent_group(process_group)
        self.groups = Groups(parent, timeout_of(parent, timeout))
        self.rank, self.world = self.groups.rank, self.groups.world
        self.seed, self.step = seed, 0
        self._named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
        if not self._named:
            raise UsageError("the model has no floating-point parameters: there is nothing to train")
        self.device = one_device([p for _, p in self._named])
        self.recorder = recorder or process_recorder(self.device)
        self._counted = recorder is None
        self.shapes: Sequence[Shape] = [Shape(n, tuple(p.shape), p.dtype) for n, p in self._named]
        allowed = None if compress is None else allowed_codecs(compress, device=self.device.type)
        self.plan = first_plan(
            plan, self.shapes, compress=compress, exchange=exchange, auto=allowed is not None, world=self.world
        )
        self._open = self._outstanding = self._queued = self._syncing = False
        self._said: set[str] = set()
        self._stepping = self._closed = self._exchanged = False
        self._buffers = [b for b in model.buffers() if b.numel()] if buffers else []
        self._buffers_sent: Any = None
        self._usage: Usage | None = None
        self._parked: States = {}
        self.units: Sequence[UnitRun] = []
        self.slots: Sequence[Slot] = [Slot(n, p, i, p.detach()) for i, (n, p) in enumerate(self._named)]
        self._active: list[bool] = []
        self.sentinel = sentinel
        self._sentinel = Sentinel(self, every=sentinel)
        self._stepper = Stepper(self, update)
        self.auto: Tuner | None = None
        self._profile: StepObserver | None = None
        if self.world == 1:
            return
        self._syncing = True
        self._held: list[UnitRun] = []
        self.executor: Any = None
        self.auto = Tuner(self, allowed) if allowed is not None or (tune and plan is None) else None
        self._compiled: Any = None
        self._watched = PeerMonitor(self)
        try:
            self._start(optimizers, workers)
        except BaseException as error:
            self._let_go(error)
            raise
        close_at_exit(self)

    # -- what users call

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward passes in this context exchange nothing."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def wait(self) -> None:
        """Return when everything in flight is done: gradients averaged, parameters updated, buffers there."""
        if self.world == 1 or self._closed:
            return
        self._finish_backward()
        self._settle()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's codec state, `"<parameter>.<key>"` to plain tensors, and the step; save one a rank."""
        self.wait()
        return flat_state(self._states(), self.step)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state_dict`; any plan will do. For another world size, see `codecs.reshard`."""
        self.wait()
        states, self.step = read_state(state, {slot.name: slot.parameter for slot in self.slots})
        self._parked = {n: {k: t.to(self.device) for k, t in s.items()} for n, s in states.items()}
        if self.world > 1:
            self._build(carry=False)

    def replan(self, plan: Plan) -> None:
        """Go on with another plan; all ranks call this between the same two steps. State is carried over by name."""
        plan.check(self.shapes, world=max(2, self.world))
        if self.world == 1:
            self.plan = plan
            return
        self.wait()
        with self._watched.communicating("replan"):
            self.groups.agree(plan.hash, "plans")
            self.plan = plan
            self._open_groups()
        self._build()

    def close(self) -> None:
        """Finish what is in flight, give model and optimizers back as they were, end all threads."""
        self._close(sys.exc_info()[1])

    def _close(self, reason: BaseException | None, *, leave: bool = False) -> None:
        """`reason`: the error with which the user's code ends; `leave` what is in flight."""
        if self._closed or self.world == 1:
            self._closed = True
            self._uncount()
            return
        if reason is not None and (leave or self._open):
            # Half a backward pass cannot be finished. The others learn why before they see that it fails.
            self._watched.leave(reason)
            self.executor.fail(reason)
        try:
            if self.executor.failure is None:
                self.wait()
        finally:
            self._let_go(reason)
            if self.executor.failure is None:
                self.groups.close()

    def _uncount(self) -> None:
        """The process's recorder counts those that file their spans there."""
        self.recorder.engines -= self._counted
        self._counted = False

    def _let_go(self, reason: BaseException | None) -> None:
        self._closed = True
        self._uncount()
        for slot in self.slots:
            for hook in slot.hooks:
                hook.remove()
        self._release()
        self._stepper.restore()
        if self._compiled is not None:
            self._compiled.close()
        self._watched.close(reason)
        if self.executor is not None:
            self.executor.close()
        forget(self)

    # -- set-up

    def _start(self, optimizers: Sequence[torch.optim.Optimizer], workers: int) -> None:
        # Plans first: with different ones the ranks would make different groups.
        with self._watched.communicating("attach"):
            self.groups.open(0)
            agree(self)
            self._open_groups()
            self.executor = make_executor(self, workers)
            with torch.no_grad():
                self.groups.broadcast([p for _, p in self._named] + list(self.model.buffers()))
        self._build()
        for slot in self.slots:
            self._hook(slot)
        for optimizer in optimizers:
            self._stepper.adopt(optimizer)
        self._compiled = Compiled(self)

    def _open_groups(self) -> None:
        # One more than the rounds, for the buffers: a group's collectives come in one order.
        self.groups.open(rounds_in(self.plan, self.shapes) + 1)
        with self.on_device():
            # In one order on every rank: with NCCL, connecting communicates.
            self.links: Mapping[str, list[exchange.Link]] = {
                text: [exchange.connect(text, group) for group in self.groups.rounds[:-1]]
                for text in sorted({row.exchange for row in self.plan.units})
            }

    def on_device(self) -> AbstractContextManager[Any]:
        """The model's device as the current one: a user need not have set it."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def communicating(self, what: str) -> AbstractContextManager[None]:
        """A context for a communication of the training thread; a lost peer becomes a named error in it."""
        return self._watched.communicating(what)

    def tell_peers(self, doing: str) -> None:
        """Say what this rank is doing now; other ranks quote it when this one is lost."""
        self._watched.doing = doing

    def fail(self, error: BaseException) -> None:
        """Stop all that is in flight with this error."""
        if self.executor is not None:
            self.executor.fail(error)

    @property
    def compiled(self) -> bool:
        """Whether compiled code reads the parameters, so that their touches cannot be seen."""
        return bool(self._compiled.entered)

    @property
    def fell_back(self) -> bool:
        """Whether the sentinel has made units dense: they must not be compressed again."""
        return self._sentinel.fell_back

    def profile(self, observer: StepObserver | None) -> None:
        """Run steps without overlap from now on and report them to `observer`; None: back to normal."""
        self._profile = observer

    def observe_touches(self, tickets: Sequence[Ticket]) -> None:
        """Let the next touch of every parameter go through its ticket (one per slot), with nothing in flight."""
        for slot, ticket in zip(self.slots, tickets, strict=True):
            pending.mark(slot.parameter, ticket)

    def owes_a_step(self) -> bool:
        """Whether the last exchange left codec states that an optimizer has still to commit."""
        return self._stepper.owes_a_step()

    def _hook(self, slot: Slot) -> None:
        if slot.hooks or not slot.parameter.requires_grad:
            return
        slot.hooks.append(slot.parameter.register_hook(lambda _, s=slot: self._before_gradient(s)))
        slot.hooks.append(slot.parameter.register_post_accumulate_grad_hook(lambda _, s=slot: self._on_gradient(s)))

    def _build(self, *, carry: bool = True) -> None:
        """Units of the parameters that train now; what the others have kept waits for them."""
        states = self._states() if carry else self._parked
        self._active = [slot.parameter.requires_grad for slot in self.slots]
        before = self.units if carry else []
        self.units = units_of(self.plan.units, self.slots, self.links, states, before=before)
        live = {slot.name for unit in self.units for slot in unit.slots}
        self._parked = {name: tensors for name, tensors in states.items() if name not in live}
        # Where parameters are frozen a unit may have fewer parts than its row says.
        launches = {(unit.row.name, launch.part): launch for unit in self.units for launch in unit.launches}
        self._order = [launches[part] for part in self.plan.order if part in launches]

    def _states(self) -> States:
        return {**self._parked, **gathered(self.units, {s.name: s.shape for s in self.shapes})}

    # -- backward

    def _before_gradient(self, slot: Slot) -> None:
        """A gradient is about to be accumulated: what the last pass has in flight must have landed."""
        if self._open and slot.fired:
            self._finish_backward()
        if self._outstanding:
            self._settle()

    def _on_gradient(self, slot: Slot) -> None:
        if not self._syncing or self._closed:
            return
        if not self._open:
            self._begin()
        if not self._queued:
            self._queued = True
            after_backward(self._backward_ended)
        unit = slot.unit
        if unit is None:
            return
        if slot.fired:
            raise RuntimeError(
                f"the gradient of '{slot.name}' was accumulated twice in one backward pass: a shared parameter under"
                " reentrant checkpointing? Use torch.utils.checkpoint(..., use_reentrant=False)"
            )
        slot.fired = True
        if self._profile is not None:
            self._profile.gradient_complete(slot)
        unit.missing -= 1
        if not unit.missing:
            self._go(unit)

    def _begin(self) -> None:
        if self._outstanding:
            self._settle()
        if self.executor.failure is not None:
            raise self.executor.failure
        if [slot.parameter.requires_grad for slot in self.slots] != self._active:
            self._changed()
        self._watched.doing = f"step {self.step}: backward"
        self._open = True
        if self.auto is not None:
            self.auto.backward_begins(self._active)
        where = Where(self.step, self.rank, self.world, self.seed)
        measure = self._sentinel.due(self.step + 1)
        for unit in self.units:
            unit.begin()
            unit.exchanged = self.executor.promise()
            for launch in unit.launches:
                launch.where, launch.measure = where, measure and bool(unit.codec.feedback)
                launch.step = self.recorder.step
        self.executor.begin(self._order)

    def _changed(self) -> None:
        """Parameters were frozen or set free since the last pass; every rank must have done the same."""
        for slot in self.slots:
            self._hook(slot)
        trained = [slot.name for slot in self.slots if slot.parameter.requires_grad]
        with self._watched.communicating("the list of trained parameters"):
            self.groups.agree("\n".join(trained), "the parameters that require gradients")
        self._build()

    def _go(self, unit: UnitRun) -> None:
        """A unit's gradients are complete."""
        ticket = Exchanged(self, unit)
        unit.collect()
        for grad in unit.targets:
            if grad is not None:
                pending.mark(grad, ticket)
        if self._profile is None:
            self.executor.ready(unit)
        else:
            self._held.append(unit)

    def _backward_ended(self) -> None:
        self._queued = False
        if not in_nested_backward():
            self._finish_backward()

    def _finish_backward(self) -> None:
        """Units that wait for gradients which will not come are sent with zeros for them."""
        if not self._open:
            return
        self._queued = False
        slots = [slot for unit in self.units for slot in unit.slots]
        self._usage = Usage(self, slots)
        if not all(slot.fired for slot in slots):
            self._usage.fill()
            for unit in self.units:
                if unit.missing:
                    unit.missing = 0
                    self._go(unit)
        if self._profile is not None:
            self._profile.backward_ended()
            with self._profile.issuing_launches():
                for unit in self._held:
                    self.executor.ready(unit)
            self._held = []
        self._open, self._outstanding, self._exchanged = False, True, True
        if self._buffers:
            self._send_buffers()
        self._watched.doing = f"step {self.step}: after backward"

    def _send_buffers(self) -> None:
        # Anew each time, for a module may have put others in their place.
        self._buffers = [b for b in self.model.buffers() if b.numel()]
        self._buffers_sent = send(self, self._buffers)

    def _gradient_touched(self) -> None:
        """Somebody reads a gradient between backward and step."""
        if self._open:
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "a hook read .grad of a parameter that is being exchanged: register it before syncline.attach"
                )
            self._finish_backward()
        if not self._stepping:
            self.say("gradients are read between backward and step (clipping, scaling, logging): they are waited for")

    def _settle_gradients(self) -> None:
        for unit in self.units:
            unit.exchanged.wait()

    def _settle(self) -> None:
        """Wait for all that is in flight, and give every tensor its own class back."""
        for unit in self.units:
            if unit.exchanged is not None:
                unit.exchanged.wait()
            for promise in unit.updated:
                promise.wait()
        self._stepper.wait()
        if self._buffers_sent is not None:
            self._buffers_sent.wait()
        if self._usage is not None:
            self._usage.wait()
            self._usage = None
        self._release()
        for unit in self.units:
            unit.drop()
        self._buffers_sent = None
        self._outstanding = False

    def _release(self) -> None:
        for slot in self.slots:
            pending.release(slot.parameter)
            if slot.grad is not None:
                pending.release(slot.grad)
        for buffer in self._buffers:
            pending.release(buffer)

    def _stepped(self) -> None:
        """An optimizer has stepped, or has scheduled its updates."""
        counted, self._exchanged = self._exchanged, False
        self.step += counted
        self._sentinel.after_optimizer_step(first=counted)
        if self.auto is not None:
            self.auto.after_optimizer_step(first=counted)
        self._watched.doing = f"step {self.step}: forward"
        if self._compiled.outside:
            self.say("the model runs inside compiled code: every step waits for its updates")
            self.wait()

    def say(self, text: str) -> None:
        """A remark for the user, once, by rank 0."""
        if text not in self._said:
            self._said.add(text)
            if self.rank == 0:
                _log.warning("syncline: %s", text)
