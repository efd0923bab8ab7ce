"""`Sync`, the engine that `attach` returns: what users call, and the wiring of its parts.

A step, as the engine sees it:

    a parameter's gradient is accumulated     its unit counts down (backward.py)
    a unit is complete                        the executor runs its launches in the plan's order
    backward ends                             ranks agree on unused parameters; buffers are sent
    p.grad is touched                         wait for that unit's exchange (inflight/)
    optimizer.step()                          codec states are committed; each unit is updated as its gradients arrive
    a parameter is touched                    wait for its update
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from syncline.engine import attached_models, metrics
from syncline.engine.agreement import agree_to_leave_reducer
from syncline.engine.backward import Backward
from syncline.engine.executors.serial import SerialExecutor
from syncline.engine.executors.threads import ThreadExecutor
from syncline.engine.health.peer_errors import PeerMonitor
from syncline.engine.health.sentinel import Sentinel
from syncline.engine.inflight import wait_on_touch
from syncline.engine.inflight.compiled_code import CompiledCode
from syncline.engine.inflight.plain_copies import keep_copies_plain
from syncline.engine.inflight.tracker import InFlight
from syncline.engine.inflight.unguarded import guard_process
from syncline.engine.launch.capture import Captures
from syncline.engine.launch.units import Slot, UnitRun, flat_state, read_state
from syncline.engine.optimizer.find_optimizers import OptimizerFinder
from syncline.engine.optimizer.step import Stepper
from syncline.engine.process_groups import Groups
from syncline.engine.protocols import Executor, Freezing, PassObserver, StepObserver, Ticket
from syncline.engine.reducer_backward import ReducerBackward
from syncline.engine.running_plan import RunningPlan
from syncline.engine.same_job import agree_on_job, agree_on_plan
from syncline.engine.shutdown import close_at_exit, close_when_collected, forget
from syncline.engine.step_state import Phase, StepState
from syncline.engine.tuning.plan_memory import PlanMemory
from syncline.engine.tuning.tuner import Tuner
from syncline.errors import UsageError
from syncline.exchange import Link
from syncline.plan import Plan, Shape
from syncline.plan.auto_spec import Auto
from syncline.trace import Recorder
from syncline.trace.record.recorder import process_recorder
from syncline.wording import plural

_log = logging.getLogger("syncline")


class Sync:
    """The engine of one model.

    `wait`, `no_sync`, `metrics`, `state_dict`, `load_state_dict`, `replan`, `trainers`, `serve` and `close` are for
    users. The other public names are for the engine's own parts (see `engine/protocols.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        groups: Groups,
        device: torch.device,
        plan: Plan,
        shapes: Sequence[Shape],
        automatic: Auto | None,
        overlap: Plan | None,
        memory: PlanMemory,
        buffers: bool,
        update: str | None,
        sentinel: int,
        recorder: Recorder | None,
        seed: int,
        workers: int,
        capture: bool,
    ) -> None:
        """`attach` has checked the arguments. `automatic`: what "auto" may do, None for the codecs of the plan.

        `overlap`: the plan from which tuning starts with our own executor; None: no tuning.
        """
        self.model, self.groups, self.device = model, groups, device
        self.rank, self.world = groups.rank, groups.world
        self.step = 0
        self.shapes = shapes
        parameters = dict(model.named_parameters())
        named = [(shape.name, parameters[shape.name]) for shape in shapes]
        self.slots: Sequence[Slot] = [Slot(n, p, i, p.detach()) for i, (n, p) in enumerate(named)]
        self.recorder = recorder or process_recorder(device, group=self.groups.label)
        self._counted = recorder is None
        self._said: set[str] = set()
        self._step_times = metrics.StepTimes()
        scripted = isinstance(model, torch.jit.ScriptModule)
        self.reducer_suits = not scripted and not any(s.parameter.is_complex() for s in self.slots)
        self._profiled = False
        self.freeze: Freezing | None = None
        """Freezes blocks of the model; None without `attach(..., freeze=...)`."""
        self._state = StepState()
        self._running = RunningPlan(plan, shapes, self.slots, groups)
        self._in_flight = InFlight(self, self._state)
        changes = attached_models.ModelChanges(model, self.slots)
        self._sentinel = Sentinel(self, every=sentinel)
        self.auto: Tuner | None = None
        if overlap is not None and self.world > 1:
            self.auto = Tuner(self, automatic, overlap=overlap, memory=memory)
        self._backward = Backward(
            self,
            self._state,
            self._in_flight,
            self._running,
            seed=seed,
            buffers=buffers,
            measure=self._sentinel.due,
            check_model=changes.check,
            began=self._pass_begins,
        )
        self._reducer = ReducerBackward(
            self,
            self._state,
            self._running,
            self._backward,
            began=self._pass_begins,
            unsuitable=self._leave_reducer,
        )
        self.stepper = Stepper(
            self,
            self._state,
            self._in_flight,
            update=update,
            check_model=changes.check,
            finish_backward=self._finish_backward,
            before_step=self._before_step,
            dropped=self._backward.gradients_zeroed,
            stepped=self._after_step,
        )
        attached_models.remember(self)
        if self.world == 1:
            return
        self._peers = PeerMonitor(self)
        self._captures: Captures | None = None
        self._capture_stream: Any = None
        self.executor = self._make_executor(workers, capture=capture)
        self._compiled: CompiledCode | None = None
        self._end_plain_copies = keep_copies_plain()
        self._finder: OptimizerFinder | None = None
        self._unguard = guard_process(self._backward.tensor_swapped)
        self._finalizer: Any = None
        try:
            tuned = None if self.auto is None else self.auto.automatic or "order"
            sent = self._backward.buffers.count
            self._start(optimizers, {"seed": seed, "sentinel": sentinel, "buffers": sent, "tune": tuned})
        except BaseException as error:
            self._end(error)
            raise
        close_at_exit(self)

    # -- for users

    @contextmanager
    def no_sync(self, *, enabled: bool = True) -> Iterator[None]:
        """Accumulate gradients locally: backward passes in this context exchange nothing.

        `enabled=False`: they exchange, also inside another `no_sync`.
        """
        before = self._backward.exchanges
        self._backward.exchanges = not enabled and not self.closed
        try:
            yield
        finally:
            self._backward.exchanges = before

    def wait(self) -> None:
        """Return when nothing is in flight: gradients are averaged, parameters updated, buffers received."""
        if self.world == 1 or self.closed:
            return
        self._finish_backward()
        if not self._reducer.active:
            self._in_flight.settle()

    @property
    def trainers(self) -> int:
        """How many ranks (the first ones) train; the others are dedicated servers."""
        return self._running.trainers

    def serve(self, steps: int) -> None:
        """Aggregate for this many steps of the ranks that train; for dedicated servers, in place of the loop.

        The parameters of a server are not updated. A server waits for the next step no longer than the timeout.
        """
        if self.rank < self.trainers:
            raise UsageError(
                f"rank {self.rank} trains, and serve is for dedicated servers: attach with"
                ' exchange="server(servers=1, dedicated=true)" and call serve on ranks from sync.trainers on'
            )
        for _ in range(steps):
            self._backward.serve()
            self._after_step(True)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's codec state, `"<parameter>.<key>"` to plain tensors, and the step; save one per rank."""
        self.wait()
        self._backward.commit_used(self._running.units)
        return flat_state(self._running.states(), self.step)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`, under any plan. For another world size, see `codecs.reshard`."""
        self.wait()
        states, self.step = read_state(state, {slot.name: slot.parameter for slot in self.slots})
        self._running.load({n: {k: t.to(self.device) for k, t in s.items()} for n, s in states.items()})
        if self.world > 1:
            self._use_planned_executor()

    def replan(self, plan: Plan) -> None:
        """Continue with another plan; all ranks call this between the same two steps. Codec state is kept by name."""
        plan.check(self.shapes, world=max(2, self.world))
        if self.world == 1:
            self._running.plan = plan
            return
        self.wait()
        with self.communicating("replan"), self.on_device():
            agree_on_plan(self.groups, plan)
            same = plan.hash == self.plan.hash and bool(self.groups.rounds)
            self._running.plan = plan
            if same:
                return  # it runs already; its facts may be new
            self._running.connect()
        self._running.build()
        self._use_planned_executor()

    def metrics(self) -> dict[str, float]:
        """Numbers for a log: bytes sent per step, compression ratio, step time and more, as far as they are known.

        It communicates with nobody. docs/engine.md has the list.
        """
        live = [shape for shape, slot in zip(self.shapes, self.slots, strict=True) if slot.parameter.requires_grad]
        return metrics.collect(
            step=self.step,
            plan=self.plan,
            shapes=live,
            world=self.world,
            times=self._step_times,
            auto=self.auto,
            residual_share=self._sentinel.residual_share,
            recorder=self.recorder,
        )

    def close(self, *, reuse_groups: bool = True) -> None:
        """Finish what is in flight, restore model and optimizers, end all threads.

        `reuse_groups`: later engines may use this one's process groups, if all ranks close at the same point.
        """
        self._close(sys.exc_info()[1], leave=False, reuse_groups=reuse_groups)

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self._state.phase is Phase.CLOSED

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._running.plan

    def __repr__(self) -> str:
        """The model, its units and codecs, the step, and what is in flight."""
        codecs = ", ".join(sorted({unit.codec for unit in self.plan.units}))
        codecs += ", torch's reducer" if self.plan.executor == "reducer" else ""
        return (
            f"<Sync of {type(self.model).__name__} on rank {self.rank} of {self.world}:"
            f" {plural(len(self.plan.units), 'unit')}, {codecs}; step {self.step}; {self._state.phase.value}>"
        )

    # -- closing

    def close_at_exit(self, reason: BaseException | None) -> None:
        """The script ends, with this error if it raised one."""
        self._close(reason, leave=True, reuse_groups=True)

    def _close(self, reason: BaseException | None, *, leave: bool, reuse_groups: bool) -> None:
        """`reason`: the error with which the user's code ends; `leave`: do not finish what is in flight then."""
        if self.freeze is not None:
            self.freeze.close()
        if self.closed or self.world == 1:
            self._state.close()
            self._leave_recorder()
            attached_models.forget(self)
            return
        if reason is not None and (leave or self._state.phase is Phase.BACKWARD):
            # Half a backward pass cannot be finished. Peers get the reason before they see that it fails.
            self.abort(reason)
        try:
            if self.executor.failure is None:
                self.wait()
        finally:
            self._end(reason)
            if self.executor.failure is None and reuse_groups:
                self.groups.close()

    def _end(self, reason: BaseException | None) -> None:
        """Restore everything and end all threads, without waiting."""
        self._state.close()
        attached_models.forget(self)
        self._leave_recorder()
        self._backward.close()
        self._reducer.stop()
        self._in_flight.release()
        if self._finder is not None:
            self._finder.close()
        self.stepper.restore()
        if self._compiled is not None:
            self._compiled.close()
        self._unguard()
        self._end_plain_copies()
        self._peers.close(reason)
        self.executor.close()
        forget(self)
        if self._finalizer is not None:
            self._finalizer.detach()

    def forked(self) -> None:
        """This is a forked child, without the engine's threads: its copies of model and optimizers become plain."""
        self._state.close()
        self._backward.close()
        if self._finder is not None:
            self._finder.close()
        if self._finalizer is not None:
            self._finalizer.detach()  # the parent's peers are not told
        self.stepper.restore()
        if self._compiled is not None:
            self._compiled.close()

    def _leave_recorder(self) -> None:
        """The recorder of the process counts the engines that use it."""
        self.recorder.engines -= self._counted
        self._counted = False

    # -- set-up

    def _start(self, optimizers: Sequence[torch.optim.Optimizer], options: Mapping[str, object]) -> None:
        with self.communicating("attach"), self.on_device():
            self.groups.open(0)
            # Before groups are made: with different plans the ranks would make different ones.
            agree_on_job(self, options)
            self._running.connect()
            with torch.no_grad():
                sent = self.model.buffers() if self._backward.buffers.count else ()
                self.groups.broadcast([*self.model.parameters(), *sent])
        self._running.build()
        self._backward.buffers.hook_model()
        if not self.reducer_suits and self.plan.executor == "reducer":
            self._use_own_executor("the model has complex parameters or is TorchScript")
        self._use_planned_executor()
        for optimizer in optimizers:
            self.stepper.adopt(optimizer)
        finder = self._finder = OptimizerFinder(self, self.stepper)
        compiled = self._compiled = CompiledCode(
            self.model,
            wait=self.wait,
            marked=lambda: self._in_flight.marked and self._state.phase is not Phase.BACKWARD,
        )
        # Nothing but model and optimizers holds the engine. Groups stay: ranks collect garbage at different times.
        undo = [self._unguard, self._end_plain_copies, compiled.stop_watching, finder.close, self._peers.close]
        self._finalizer = close_when_collected(self, partial(_leave_dropped, undo, self.recorder, self._counted))
        self._finalizer.atexit = False
        if self.auto is not None:
            with self.communicating("the plans of earlier runs"), self.on_device():
                self.auto.recall()

    def _use_planned_executor(self) -> None:
        """Let the plan's executor have the next backward pass. Nothing is in flight; the same on all ranks."""
        if self.plan.executor == "reducer" and not self._profiled and not self._running.owes_residuals:
            self._backward.remove_hooks()
            self._reducer.start()
        else:
            self._reducer.stop()
            self._backward.add_hooks()
        self.stepper.guard_states(not self._reducer.active)

    def _leave_reducer(self, why: str, parameters: Sequence[Tensor]) -> None:
        """The loop does what torch's reducer cannot do: run the same units with our own executor, for good.

        `parameters` have local gradients, of a pass that has just ended.
        """
        agree_to_leave_reducer(self, why)
        self._use_own_executor(why)
        self._use_planned_executor()
        if parameters:
            self._backward.average(parameters)

    def _use_own_executor(self, why: str) -> None:
        self.say(f"{why}: gradients are averaged by Syncline's executor instead of torch's reducer")
        self.reducer_suits = False
        self._running.plan = replace(self.plan, executor="overlap")

    def _finish_backward(self) -> None:
        if self._reducer.active:
            self._reducer.finish()
        else:
            self._backward.finish()

    def _before_step(self) -> None:
        """End the pass before an optimizer steps. Without a pass, the others learn here that all is frozen now."""
        self._finish_backward()
        no_pass = self._state.phase in (Phase.IDLE, Phase.UPDATING)
        if no_pass and any(self._running.trained) and not any(slot.parameter.requires_grad for slot in self.slots):
            self.wait()
            self._backward.frozen_parameters_changed()
            self._reducer.release()
        elif no_pass and self._backward.exchanges and not self._reducer.active:
            # Nobody has seen a pass in which only parameters trained that were frozen until now.
            unseen = [slot.parameter for slot in self.slots if not slot.hooks and slot.parameter.requires_grad]
            if unseen and any(parameter.grad is not None for parameter in unseen):
                self.wait()
                self._backward.add_hooks()
                self._backward.average([parameter for parameter in unseen if parameter.grad is not None])

    def _make_executor(self, workers: int, *, capture: bool) -> Executor:
        if self.device.type == "cuda":
            from syncline.engine.executors.graphs import GraphTape
            from syncline.engine.executors.streams import StreamExecutor

            self._captures = Captures(partial(GraphTape, self.device)) if capture else None
            executor = StreamExecutor(self.recorder, self.device, peers=self._peers, captures=self._captures)
            self._capture_stream = executor.first_stream if capture else None
            return executor
        return ThreadExecutor(self.recorder, workers=workers, peers=self._peers, cut=self.groups.cut)

    # -- for the engine's own parts: EngineView and TunableEngine of protocols.py

    @property
    def capture_stream(self) -> Any:
        """The first stream of launches that replay CUDA graphs; None if there are none."""
        return self._capture_stream

    @property
    def units(self) -> Sequence[UnitRun]:
        """The plan's units of parameters that train now."""
        return self._running.units

    @property
    def links(self) -> Mapping[str, list[Link]]:
        """For every exchange in the plan, one link per round of communication."""
        return self._running.links

    def on_device(self) -> AbstractContextManager[Any]:
        """A context in which the model's device is the current one: the user may not have set it."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def say(self, text: str) -> None:
        """Log a remark for the user, once, on rank 0."""
        if text not in self._said:
            self._said.add(text)
            if self.rank == 0:
                _log.warning("syncline: %s", text)

    def communicating(self, what: str) -> AbstractContextManager[None]:
        """A context for a communication of the training thread; a lost peer becomes a named error in it."""
        return self._peers.communicating(what)

    def tell_peers(self, doing: str) -> None:
        """Say what this rank is doing now; other ranks quote it when this one is lost."""
        self._peers.doing = doing

    def fail(self, error: BaseException) -> None:
        """Stop all that is in flight with this error."""
        self.executor.fail(error)

    def abort(self, error: BaseException) -> None:
        """Stop all that is in flight with this error, here and on the other ranks, which quote it."""
        self._peers.leave(error)
        self.executor.fail(error)

    def wait_for_agreement(self, agreed: threading.Event) -> list[int]:
        """Wait until all ranks have agreed to a change; returns ranks that have begun the next pass without it."""
        return self._peers.wait_for_agreement(agreed)

    def refuse(self, error: UsageError) -> BaseException:
        """Stop all that is in flight with this error on every rank; returns the one of the first rank that does so."""
        found = self._peers.refuse(error)
        self.executor.fail(found)
        return found

    def _pass_begins(self, trained: Sequence[bool]) -> None:
        """A backward pass that is averaged begins; these parameters train in it."""
        self._peers.passes += 1
        if self.auto is not None:
            self.auto.backward_begins(trained)

    @property
    def compiled(self) -> bool:
        """Whether compiled code reads the parameters, so that their touches cannot be seen."""
        return self._compiled is not None and self._compiled.reads_parameters

    @property
    def fell_back(self) -> bool:
        """Whether the sentinel has made units dense: they must not be compressed again."""
        return self._sentinel.fell_back

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of the optimizers; 0 if it is not known."""
        return self.stepper.learning_rate()

    def owes_a_step(self) -> bool:
        """Whether the last exchange left codec states that an optimizer has still to commit."""
        return self.stepper.owes_a_step()

    def profile(self, observer: StepObserver | None) -> None:
        """Run steps without overlap from now on and report them to `observer`; None: back to normal."""
        inner = self.executor.inner if isinstance(self.executor, SerialExecutor) else self.executor
        self.executor = inner if observer is None else SerialExecutor(inner, observer, self.wait)
        self._backward.observer = None if observer is None else observer.gradient_complete
        self._profiled = observer is not None
        self._use_planned_executor()

    def watch_passes(self, observer: PassObserver | None) -> None:
        """Report the backward passes under torch's reducer to `observer` from now on; None: to nobody."""
        self._reducer.observer = observer

    def observe_touches(self, tickets: Sequence[Ticket]) -> None:
        """Let the next touch of every parameter go through its ticket (one per slot), with nothing in flight."""
        self._in_flight.observe_touches(self.slots, tickets)

    def _after_step(self, first: bool) -> None:
        """An optimizer has stepped or handed over its updates; `first`: the first one since the backward pass."""
        self.step += first
        if first:
            self._step_times.step_ended()
        self._sentinel.after_optimizer_step(first=first)
        if self.auto is not None:
            self.auto.after_optimizer_step(first=first)
        if self._captures is not None and self._captures.changed:
            self._running.plan = replace(self.plan, about={**self.plan.about, "capture": self._captures.report()})
        if self.plan.executor == "reducer" and not self._reducer.active and not self._profiled:
            self.wait()
            if self._running.owes_residuals:
                with self.communicating("residuals that were sent"):
                    self._running.forget_sent_residuals()
            self._use_planned_executor()  # residuals of the plan before may have been sent now
        self.tell_peers(f"step {self.step}: forward")
        assert self._compiled is not None
        self._compiled.after_step()
        if self._compiled.step_must_wait:
            self.say("the model runs inside compiled code: every step waits for its updates")
            self.wait()


def _leave_dropped(undo: Sequence[Callable[[], object]], recorder: Recorder, counted: bool) -> None:
    """The user dropped model, optimizers and engine without `close`: threads end, and nothing is left in torch."""
    for each in undo:
        each()
    wait_on_touch.release_done()
    recorder.engines -= counted
