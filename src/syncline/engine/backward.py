"""The backward side of the engine: hooks on parameters, the countdown of each unit, and the end of the pass.

A parameter's gradient is accumulated: its unit counts down. A unit is complete: its gradients are marked as in flight
and the executor gets its launches. The pass ends: ranks agree on the parameters that nobody used, and buffers are sent.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from syncline._compat.autograd import after_backward, in_backward, in_nested_backward, run_last
from syncline._compat.tensors import forget_hooks
from syncline.engine.agreement import UsedParameters, agree_on_frozen
from syncline.engine.attached_models import refuse_attached
from syncline.engine.inflight.tracker import InFlight
from syncline.engine.launch.collect_gradients import accumulated_twice, collect_gradients, must_wait_for_end
from syncline.engine.launch.units import Slot, StepContext, UnitRun
from syncline.engine.model_buffers import ModelBuffers
from syncline.engine.protocols import EngineView, Ticket
from syncline.engine.running_plan import RunningPlan
from syncline.engine.step_state import Phase, StepState
from syncline.errors import UsageError

_BACKWARD = Phase.BACKWARD


class Backward:
    """Follows backward passes through hooks on the parameters.

    Thread: the training thread, or autograd's thread while `backward` blocks it; `GradientTicket.wait` comes from any
    thread that reads a gradient.
    """

    def __init__(
        self,
        engine: EngineView,
        state: StepState,
        in_flight: InFlight,
        running: RunningPlan,
        *,
        seed: int,
        buffers: bool,
        measure: Callable[[int], bool],
        check_model: Callable[[], None],
        began: Callable[[Sequence[bool]], None],
    ) -> None:
        """`measure(step)`: whether the sentinel needs norms of this step; `check_model` raises if the model has other
        parameters now; `began`: is told which parameters train.
        """
        self._engine, self._state, self._in_flight, self._running = engine, state, in_flight, running
        self._seed, self._measure, self._began = seed, measure, began
        self._check_model = check_model
        self.slots = engine.slots
        self.exchanges = True
        """False under `no_sync`, and after close: gradients are only accumulated."""
        self.buffers = ModelBuffers(engine, state, in_flight, running, send=buffers, exchanges=lambda: self.exchanges)
        self._passes = 0
        """Passes that were exchanged."""
        self._end_queued = False
        """Whether autograd will call `_backward_ended`."""
        self._uncommitted = False
        """Whether units may have codec states of the last pass that no step has committed."""
        self.observer: Callable[[Slot], None] | None = None
        """Is called for every gradient that is accumulated (profiling)."""

    def add_hooks(self) -> None:
        """Hook all parameters that train and have no hooks yet."""
        for slot in self._engine.slots:
            parameter = slot.parameter
            if not slot.hooks and parameter.requires_grad:
                # Pickles of parameters have no hooks, and torch would warn of those that are not declared so.
                before = unserializable_hook(lambda _, s=slot: self._before_gradient(s))
                slot.hooks.append(parameter.register_hook(before))
                # The garbage collector does not see what these hooks refer to; the one above keeps the engine.
                after = partial(_after_gradient, weakref.ref(self), slot.index)
                slot.hooks.append(parameter.register_post_accumulate_grad_hook(after))

    def remove_hooks(self) -> None:
        """Leave the gradients of all parameters alone."""
        for slot in self._engine.slots:
            for hook in slot.hooks:
                hook.remove()
            slot.hooks = []

    def tensor_swapped(self, tensor: Tensor) -> None:
        """`torch.utils.swap_tensors` has exchanged a tensor's content: a parameter's hooks went with the old one."""
        for slot in self._engine.slots:
            if slot.parameter is tensor:
                slot.alias = slot.parameter.detach()
                forget_hooks(slot.parameter)
                if slot.hooks:  # not with torch's reducer
                    slot.hooks = []
                    self.add_hooks()

    def close(self) -> None:
        """Remove the hooks, for good."""
        self.exchanges = False
        self.remove_hooks()
        self.buffers.close()

    def _before_gradient(self, slot: Slot) -> None:
        """A gradient is about to be accumulated: nothing of the last pass may be in flight."""
        if self._state.phase is _BACKWARD and slot.fired:
            self.finish()
        if self._state.in_flight:
            self._in_flight.settle()
        if self._uncommitted and self._state.phase is not _BACKWARD:
            self._check_last_gradients()
        parameter = slot.parameter
        slot.kept_grad = parameter.grad is not None
        # As with DDP, the user's hooks see and may change this rank's own gradient, whenever they were registered.
        run_last(parameter, slot.hooks[-1])

    def after_gradient(self, slot: Slot) -> None:
        """A gradient was accumulated."""
        if not self.exchanges:
            return
        if self._engine.rank >= self._running.trainers:
            raise UsageError(
                f"rank {self._engine.rank} is a dedicated server of this exchange and does not train: call"
                " sync.serve(steps) on it in place of the training loop"
            )
        if self._state.phase is not _BACKWARD:
            self._begin()
        if not self._end_queued:
            self._end_queued = True
            after_backward(self._backward_ended)
        self._gradient_complete(slot)

    def _gradient_complete(self, slot: Slot) -> None:
        unit = slot.unit
        if unit is None:
            return
        if slot.fired:
            raise accumulated_twice(slot.name)
        if slot.parameter.grad is None:
            raise UsageError(
                f"a hook of '{slot.name}' removed its gradient before it was averaged over the ranks: step the"
                " optimizer after backward, not in a hook"
            )
        slot.fired = True
        if self.observer is not None:
            self.observer(slot)
        unit.missing -= 1
        if not unit.missing and not must_wait_for_end(unit):
            self._launch(unit)

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Exchange the gradients of a pass that has ended, in which these parameters were used."""
        self._begin()
        used = {id(p) for p in parameters}
        for slot in self._engine.slots:
            if id(slot.parameter) in used:
                self._gradient_complete(slot)
        self.finish()

    def serve(self) -> None:
        """Aggregate in one pass of the ranks that train, and keep what this rank's codecs did not send."""
        for slot in self._engine.slots:
            if slot.parameter.requires_grad:
                slot.parameter.grad = torch.zeros_like(slot.parameter.detach())
        # All at once, so that a unit is received as soon as the first rank sends it.
        self.average([slot.parameter for slot in self._engine.slots if slot.parameter.requires_grad])
        self._engine.wait()
        for unit in self._running.units:
            unit.keep_states()
        for slot in self._engine.slots:
            slot.parameter.grad = None
        self._uncommitted = False

    def _begin(self) -> None:
        engine, running = self._engine, self._running
        if self._state.in_flight:
            self._in_flight.settle()
        executor = engine.executor
        if executor.failure is not None:
            raise executor.failure
        self._check_model()
        if [slot.parameter.requires_grad for slot in engine.slots] != running.trained:
            self.add_hooks()
            self.frozen_parameters_changed()
        engine.tell_peers(f"step {engine.step}: backward")
        self._state.begin_backward()
        self._began(running.trained)
        # Dedicated servers see passes and not the optimizer's steps, some of which may be skipped.
        step = engine.step if running.trainers == engine.world else self._passes
        self._passes += 1
        context = StepContext(step, engine.rank, running.trainers, self._seed)
        measure = self._measure(engine.step + 1)
        for unit in running.units:
            unit.begin()
            for launch in unit.launches:
                launch.context, launch.measure = context, measure and bool(unit.codec.feedback)
                launch.step = engine.recorder.step
        executor.begin(running.order)

    def frozen_parameters_changed(self) -> None:
        """Build units again; every rank must have frozen the same parameters."""
        engine = self._engine
        refuse_attached(engine.model, [(slot.name, slot.parameter) for slot in engine.slots], engine)
        agree_on_frozen(engine, self._running.trained)
        self._running.build()

    def _check_last_gradients(self) -> None:
        """A new pass begins. Gradients of the last one that were zeroed or replaced will not be stepped with."""
        waiting = [unit for unit in self._running.units if unit.holds_uncommitted_state]
        self.commit_used(waiting)
        for unit in waiting:
            if unit.uncommitted and unit.gradients_were_dropped():
                self._drop(unit)
        self._uncommitted = any(unit.uncommitted for unit in waiting)

    def commit_used(self, units: Sequence[UnitRun]) -> None:
        """Commit codec states of gradients that were applied by hand; with nothing in flight.

        Optimizers commit in their step. Here the parameters have changed, in a loop in which none of them steps.
        """
        used = [unit for unit in units if unit.holds_uncommitted_state and unit.was_applied_by_hand()]
        if used:
            self._engine.say("no optimizer steps: codec states are committed when the parameters have changed")
            self._engine.step += self._state.whole_step()
        for unit in used:
            unit.keep_states()

    def gradients_zeroed(self, units: Sequence[UnitRun]) -> None:
        """An optimizer is about to zero gradients of these units, with which none has stepped."""
        if any(unit.was_applied_by_hand() for unit in units):
            self._engine.wait()
            self.commit_used(units)
        for unit in units:
            if unit.uncommitted:
                self._drop(unit)

    def _drop(self, unit: UnitRun) -> None:
        """A unit's averaged gradients will not be stepped with: a skipped step leaves the residuals as they were."""
        if unit.touched and unit.holds_uncommitted_state:
            self._engine.say(
                "averaged gradients were read and dropped without optimizer.step(): this is taken as a skipped step,"
                " and residuals stay as they were before it"
            )
        unit.uncommitted = False

    def _launch(self, unit: UnitRun) -> None:
        """A unit's gradients are complete."""
        executor = self._engine.executor
        exchanged = executor.exchanged(unit)
        assert exchanged is not None
        try:
            collect_gradients(unit)
        except UsageError as error:
            self._engine.fail(error)  # this unit cannot be sent, so the pass cannot end: whoever waits gets the error
            raise
        self._in_flight.add_gradients(unit, GradientTicket(self, unit, exchanged))
        executor.ready(unit)

    def _backward_ended(self) -> None:
        """Autograd's callback; a backward pass inside another one (checkpointing) does not end the step's pass."""
        self._end_queued = False
        if not in_nested_backward():
            self.finish()

    def finish(self) -> None:
        """End the pass, if one runs: units with gradients that will not come are sent with zeros for them.

        Waits for gradients whose memory the user reads through other tensors: those reads cannot wait.
        """
        if self._state.phase is not _BACKWARD:
            return
        self._end_queued = False
        engine, units = self._engine, self._running.units
        if engine.executor.failure is not None:
            raise engine.executor.failure
        used = UsedParameters(engine, [slot for unit in units for slot in unit.slots])
        if not used.all_here:
            used.fill_with_zeros()
        for unit in units:
            if not unit.targets:
                unit.missing = 0
                self._launch(unit)
        for unit in units:
            if not unit.stepped:
                unit.note_parameters()
        engine.executor.end_backward()
        self._state.end_backward()
        self._uncommitted = True
        if self.buffers.count:
            self.buffers.send()
        self._in_flight.add_arrival(used)
        engine.tell_peers(f"step {engine.step}: after backward")
        shared = [unit for unit in units if unit.shared_memory]
        if shared:
            engine.say(
                "gradients share memory with other tensors (a flat buffer, kept views): backward waits for their"
                " averages, and step for their updates"
            )
        for unit in shared:
            exchanged = engine.executor.exchanged(unit)
            assert exchanged is not None
            exchanged.wait()

    def gradient_touched(self, unit: UnitRun) -> None:
        """Somebody reads a gradient of this unit between backward and step."""
        if self._state.phase is _BACKWARD:
            if in_backward():
                names = ", ".join(f"'{slot.name}'" for slot in unit.slots)
                raise UsageError(
                    f"a hook read .grad of a parameter that is being averaged ({names}): read a parameter's .grad in"
                    " its own hooks, or after backward"
                )
            self.finish()
        if self._state.phase is not Phase.STEPPING:
            self._engine.say(
                "gradients are read between backward and step (clipping, scaling, logging): they are waited for"
            )


def _after_gradient(known: "weakref.ref[Backward]", index: int, _: Tensor) -> None:
    """The autograd hook of a parameter."""
    backward = known()
    if backward is not None:
        backward.after_gradient(backward.slots[index])


class GradientTicket:
    """The ticket of a unit's gradients between backward and step."""

    marked: list[Tensor] | None = None

    def __init__(self, backward: Backward, unit: UnitRun, exchanged: Ticket) -> None:
        self._backward, self._unit, self._exchanged = backward, unit, exchanged

    def wait(self) -> None:
        """Wait for the unit's exchange; a pass that has not ended is ended first."""
        self._backward.gradient_touched(self._unit)
        self._unit.touched = True
        self._exchanged.wait()

    def done(self) -> bool:
        """Whether the averaged gradients are there."""
        return self._exchanged.done()
