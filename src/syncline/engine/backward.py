"""The backward side of the engine: hooks on parameters, the countdown of each unit, and the end of the pass.

A parameter's gradient is accumulated: its unit counts down. A unit is complete: its gradients are marked as in flight
and the executor gets its launches. The pass ends: ranks agree on the parameters that nobody used, and buffers are sent.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._compat import (
    after_backward,
    forget_hooks,
    has_other_hooks,
    in_backward,
    in_nested_backward,
    run_last,
    storage_users,
)
from syncline.engine.inflight.buffers import broadcast_buffers
from syncline.engine.inflight.tracker import InFlight
from syncline.engine.launch.units import Slot, StepContext, UnitRun, as_real
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
        began: Callable[[Sequence[bool]], None],
    ) -> None:
        """`measure(step)`: whether the sentinel needs norms of this step; `began`: is told which parameters train."""
        self._engine, self._state, self._in_flight, self._running = engine, state, in_flight, running
        self._seed, self._measure, self._began = seed, measure, began
        self.buffers = sum(b.numel() > 0 for b in engine.model.buffers()) if buffers else 0
        """Buffers that are sent after every pass."""
        self.exchanges = True
        """False under `no_sync`, and after close: gradients are only accumulated."""
        self._end_queued = False
        """Whether autograd will call `_backward_ended`."""
        self.observer: Callable[[Slot], None] | None = None
        """Is called for every gradient that is accumulated (profiling)."""

    def add_hooks(self) -> None:
        """Hook all parameters that train and have no hooks yet."""
        for slot in self._engine.slots:
            parameter = slot.parameter
            if not slot.hooks and parameter.requires_grad:
                slot.hooks.append(parameter.register_hook(lambda _, s=slot: self._before_gradient(s)))
                slot.hooks.append(
                    parameter.register_post_accumulate_grad_hook(lambda _, s=slot: self._after_gradient(s))
                )

    def tensor_swapped(self, tensor: Tensor) -> None:
        """`torch.utils.swap_tensors` has exchanged a tensor's content: a parameter's hooks went with the old one."""
        for slot in self._engine.slots:
            if slot.parameter is tensor:
                slot.alias = slot.parameter.detach()
                forget_hooks(slot.parameter)
                slot.hooks = []
                self.add_hooks()

    def close(self) -> None:
        """Remove the hooks."""
        self.exchanges = False
        for slot in self._engine.slots:
            for hook in slot.hooks:
                hook.remove()

    def _before_gradient(self, slot: Slot) -> None:
        """A gradient is about to be accumulated: nothing of the last pass may be in flight."""
        if self._state.phase is _BACKWARD and slot.fired:
            self.finish()
        if self._state.in_flight:
            self._in_flight.settle()
        parameter = slot.parameter
        slot.kept_grad = parameter.grad is not None
        # As with DDP, the user's hooks see and may change this rank's own gradient, whenever they were registered.
        run_last(parameter, slot.hooks[-1])

    def _after_gradient(self, slot: Slot) -> None:
        if not self.exchanges:
            return
        if self._state.phase is not _BACKWARD:
            self._begin()
        if not self._end_queued:
            self._end_queued = True
            after_backward(self._backward_ended)
        unit = slot.unit
        if unit is None:
            return
        if slot.fired:
            raise RuntimeError(
                f"the gradient of '{slot.name}' was accumulated twice in one backward pass: a shared parameter under"
                " reentrant checkpointing? Use torch.utils.checkpoint(..., use_reentrant=False)"
            )
        if slot.parameter.grad is None:
            raise UsageError(
                f"a hook of '{slot.name}' removed its gradient before it was averaged over the ranks: step the"
                " optimizer after backward, not in a hook"
            )
        slot.fired = True
        if self.observer is not None:
            self.observer(slot)
        unit.missing -= 1
        if not unit.missing and not _must_wait_for_end(unit):
            self._launch(unit)

    def _begin(self) -> None:
        engine, running = self._engine, self._running
        if self._state.in_flight:
            self._in_flight.settle()
        executor = engine.executor
        if executor.failure is not None:
            raise executor.failure
        if [slot.parameter.requires_grad for slot in engine.slots] != running.trained:
            self._frozen_parameters_changed()
        engine.tell_peers(f"step {engine.step}: backward")
        self._state.begin_backward()
        self._began(running.trained)
        context = StepContext(engine.step, engine.rank, engine.world, self._seed)
        measure = self._measure(engine.step + 1)
        for unit in running.units:
            unit.begin()
            for launch in unit.launches:
                launch.context, launch.measure = context, measure and bool(unit.codec.feedback)
                launch.step = engine.recorder.step
        executor.begin(running.order)

    def _frozen_parameters_changed(self) -> None:
        """Build units again; every rank must have frozen the same parameters."""
        engine = self._engine
        self.add_hooks()
        trained = [slot.name for slot in engine.slots if slot.parameter.requires_grad]
        with engine.communicating("the list of trained parameters"):
            engine.groups.agree("\n".join(trained), "the parameters that require gradients")
        self._running.build()

    def _launch(self, unit: UnitRun) -> None:
        """A unit's gradients are complete."""
        executor = self._engine.executor
        exchanged = executor.exchanged(unit)
        assert exchanged is not None
        _collect_gradients(unit)
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
        used = UsedParameters(engine, [slot for unit in units for slot in unit.slots])
        if not used.all_here:
            used.fill_with_zeros()
        for unit in units:
            if not unit.targets:
                unit.missing = 0
                self._launch(unit)
        engine.executor.end_backward()
        self._state.end_backward()
        if self.buffers:
            # Listed in every pass, because a module may have replaced them.
            buffers = [b for b in engine.model.buffers() if b.numel()]
            self._in_flight.add_buffers(buffers, broadcast_buffers(engine, buffers))
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


def _must_wait_for_end(unit: UnitRun) -> bool:
    """Whether autograd may still read the memory of gradients into which the averages must be written.

    A hook of the user may have kept a view of a gradient, or put a view of other memory in its place. We cannot
    distinguish that from memory that autograd shares, and autograd does not read it any more when the pass has ended.
    """
    return any(
        not slot.kept_grad and has_other_hooks(slot.parameter) and storage_users(grad) > 1
        for slot in unit.slots
        if (grad := slot.parameter.grad) is not None
    )


def _collect_gradients(unit: UnitRun) -> None:
    """Take a unit's complete gradients as they are. The objects stay; the user's memory stays theirs."""
    chain = unit.uncommitted
    for slot in unit.slots:
        grad = slot.parameter.grad
        if grad is None:
            # No rank used it: nothing of it is kept, but all ranks must send messages of the same size.
            unit.grads.append(as_real(torch.zeros_like(slot.alias)))
            unit.targets.append(None)
            unit.takes_memory.append(False)
            continue
        if grad.layout != torch.strided:
            raise UsageError(f"the gradient of '{slot.name}' is sparse: build its embedding with sparse=False")
        if grad.is_conj():
            grad.data = grad.detach().resolve_conj()  # autograd conjugates lazily; codecs need the values
        users_memory = slot.kept_grad
        if storage_users(grad) > 1:
            if slot.kept_grad or has_other_hooks(slot.parameter):
                unit.shared_memory = users_memory = True
            else:
                # Autograd may share one memory among several gradients, or read it again; ours is overwritten.
                grad.data = grad.detach().clone()
        chain = chain and grad is slot.grad
        slot.grad = grad
        unit.grads.append(as_real(grad.detach()))
        unit.targets.append(grad)
        unit.takes_memory.append(not users_memory)
    for launch in unit.launches:
        launch.chain = chain
    unit.uncommitted = True


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


class UsedParameters:
    """The number of ranks that used each parameter in a backward pass; it is summed over the ranks in the background.

    Nobody waits for it where all parameters were used on this rank.
    """

    def __init__(self, engine: EngineView, slots: Sequence[Slot]) -> None:
        self._engine, self._slots = engine, slots
        self.all_here = all(slot.fired for slot in slots)
        """Whether this rank used all of them."""
        used = [slot.fired or slot.parameter.grad is not None for slot in slots]
        for slot in slots:
            if not slot.fired:
                slot.kept_grad = slot.parameter.grad is not None
        self._counts = torch.tensor(used, dtype=torch.int32)
        self._work = dist.all_reduce(self._counts, group=engine.groups.control, async_op=True)

    def wait(self) -> None:
        """Return when all ranks have answered."""
        with self._engine.communicating("the list of used parameters"):
            self._work.wait()

    def fill_with_zeros(self) -> None:
        """Zeros for missing gradients that other ranks have, or that a codec's residual needs."""
        engine = self._engine
        engine.tell_peers(f"step {engine.step}: waiting for the ranks to say which parameters they used")
        self.wait()
        for slot, count in zip(self._slots, self._counts.tolist(), strict=True):
            assert slot.unit is not None
            if slot.parameter.grad is None and (count or slot.unit.codec.feedback):
                slot.parameter.grad = torch.zeros_like(slot.alias)
