"""Protocols between the parts of the engine: `Ticket`, `Executor`, `EngineView`, and some for profiling and freezing.

The optimizer, in-flight, tuning and health code sees the engine only through these names. No module of the engine
imports `sync.py`, but `attach.py`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.engine.launch.units import Launch, Slot, UnitRun
from syncline.engine.process_groups import Groups
from syncline.errors import UsageError
from syncline.exchange import Link
from syncline.plan import Plan, Shape
from syncline.trace import Recorder


class Ticket(Protocol):
    """A value that is not there yet: an averaged gradient, an updated parameter, a received buffer."""

    marked: list[Tensor] | None
    """The tensors whose touches wait for this ticket; None before the first. `inflight/wait_on_touch.py` keeps it."""

    def wait(self) -> None:
        """Return when the value may be used (on CUDA: by what the current stream does next); raise if it never will."""

    def done(self) -> bool:
        """Whether nobody needs to wait any more, on any stream."""


class Executor(Protocol):
    """Runs launches and updates on a device. Called from the training thread, unless a method says otherwise.

    The order of calls in a step: `begin`, `ready` for every unit, `end_backward`, `begin_updates`, `after` for every
    unit, `end_updates`.
    """

    recorder: Recorder
    lanes: int
    """How many launches can be on the network at the same time."""

    @property
    def failure(self) -> BaseException | None:
        """The error after which nothing is done any more; None while all is well."""

    def begin(self, order: Sequence[Launch]) -> None:
        """Start a backward pass; its launches run in this order. Makes a ticket for the exchange of every unit."""

    def exchanged(self, unit: UnitRun) -> Ticket | None:
        """The ticket of a unit's averaged gradients in the current pass; None before the first pass."""

    def ready(self, unit: UnitRun) -> None:
        """A unit's gradients are complete: its launches may run."""

    def end_backward(self) -> None:
        """The backward pass is over: `ready` was called for every unit."""

    def begin_updates(self, units: Sequence[UnitRun]) -> None:
        """An optimizer steps; its updates come after all that the training thread has done so far."""

    def after(self, unit: UnitRun | None, work: Callable[[], None]) -> Ticket:
        """Do `work` when the unit's gradients have been averaged, at once if `unit` is None."""

    def end_updates(self) -> None:
        """All updates of this optimizer's step have been handed over."""

    def watch(self, label: str, group: dist.ProcessGroup) -> None:
        """Others have put communication of this group on the current stream: it is an error if that does not end."""

    def fail(self, error: BaseException) -> None:
        """Do nothing any more: whoever waits gets this error. From any thread; the first error counts."""

    def close(self) -> None:
        """End all threads."""


class StepObserver(Protocol):
    """Notes when the parts of a step begin and end, while an executor runs them one after the other (profiling)."""

    def gradient_complete(self, slot: Slot) -> None:
        """A parameter's gradient was accumulated in a backward pass that will be exchanged."""

    def backward_ended(self) -> None:
        """The backward pass is over, and nothing was launched yet."""

    def issuing_launches(self) -> AbstractContextManager[None]:
        """A context; the host's time in it is the time to issue all launches."""

    def updates_begin(self) -> None:
        """All gradients are averaged; `optimizer.step()` begins."""

    def issuing_update(self) -> AbstractContextManager[None]:
        """A context; the host's time in it is the time to issue one update."""

    def updates_issued(self) -> None:
        """All updates were issued, and are waited for now."""

    def updates_done(self) -> None:
        """All parameters are updated."""


class PassObserver(Protocol):
    """Sees the backward passes that torch's reducer averages, without slowing them down."""

    def pass_begins(self) -> None:
        """A backward pass begins that will be averaged."""

    def pass_computed(self, fired: Sequence[Tensor]) -> None:
        """All its own work was issued; the gradients of these parameters were complete in this order."""

    def pass_averaged(self) -> None:
        """Its gradients are averaged."""


class WatchedEngine(Protocol):
    """An engine whose peers are watched (`health/`); `attach` and the DDP hook are such engines."""

    groups: Groups
    step: int
    """Steps taken so far."""

    def fail(self, error: BaseException) -> None:
        """Stop all that is in flight with this error."""


class EngineView(WatchedEngine, Protocol):
    """The engine as its own parts see it. All methods are for the training thread."""

    model: nn.Module
    device: torch.device
    recorder: Recorder
    rank: int
    world: int
    shapes: Sequence[Shape]
    """All parameters, in the model's order."""
    slots: Sequence[Slot]
    """The same parameters at run time."""
    executor: Executor

    @property
    def capture_stream(self) -> Any:
        """The first stream of launches that replay CUDA graphs; None if there are none."""

    @property
    def plan(self) -> Plan:
        """The plan in use."""

    @property
    def units(self) -> Sequence[UnitRun]:
        """The plan's units of parameters that train now."""

    @property
    def links(self) -> Mapping[str, list[Link]]:
        """For every exchange in the plan, one link per round of communication."""

    @property
    def trainers(self) -> int:
        """How many ranks (the first ones) train; the others are dedicated servers."""

    def wait(self) -> None:
        """Return when nothing is in flight."""

    def replan(self, plan: Plan) -> None:
        """Continue with another plan; all ranks call this between the same two steps."""

    def say(self, text: str) -> None:
        """Log a remark for the user, once, on rank 0."""

    def on_device(self) -> AbstractContextManager[Any]:
        """A context in which the model's device is the current one."""

    def communicating(self, what: str) -> AbstractContextManager[None]:
        """A context for a communication of the training thread; a lost peer becomes a named error in it."""

    def tell_peers(self, doing: str) -> None:
        """Say what this rank is doing now; other ranks quote it when this one is lost."""

    def wait_for_agreement(self, agreed: threading.Event) -> list[int]:
        """This rank changes something before its next pass: wait until all ranks have agreed to that.

        Returns as soon as ranks (global) are known that have begun that pass without a change, and names them.
        """

    def refuse(self, error: UsageError) -> BaseException:
        """Stop all that is in flight with this error on every rank; returns the one of the first rank that does so."""


class TunableEngine(EngineView, Protocol):
    """The part of the engine that only tuning needs."""

    reducer_suits: bool
    """Whether torch's reducer can run this loop, as far as it is known."""

    @property
    def compiled(self) -> bool:
        """Whether compiled code reads the parameters, so that their touches cannot be seen."""

    @property
    def fell_back(self) -> bool:
        """Whether the sentinel has made units dense: they must not be compressed again."""

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of the optimizers; 0 if it is not known."""

    def owes_a_step(self) -> bool:
        """Whether the last exchange left codec states that an optimizer has still to commit."""

    def profile(self, observer: StepObserver | None) -> None:
        """Run steps without overlap from now on and report them to `observer`; None: back to normal."""

    def watch_passes(self, observer: PassObserver | None) -> None:
        """Report the backward passes under torch's reducer to `observer` from now on; None: to nobody."""

    def observe_touches(self, tickets: Sequence[Ticket]) -> None:
        """Let the next touch of every parameter go through its ticket (one per slot), with nothing in flight."""


class Freezing(Protocol):
    """Freezes blocks of an attached model while it trains (`pipeline/freeze`)."""

    @property
    def frozen(self) -> int:
        """The number of frozen blocks, from the input."""

    def end_epoch(self, held_out_loss: float | None = None) -> int:
        """Count an epoch and freeze what the policy says; returns the number of frozen blocks. All ranks call this.

        `held_out_loss`: the loss on data that is not trained on; when it gets worse after a freeze, blocks train again.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's freeze state."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`: the same blocks are frozen, and all others train."""

    def close(self) -> None:
        """Leave the model as it is."""
