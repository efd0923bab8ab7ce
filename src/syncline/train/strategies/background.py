"""Exchange gradients in a background thread during the backward pass, for `horovod`, `byteps` and `ring-dgc`.

Hooks mark each gradient when backward has computed it. The thread works in cycles, as Horovod does: all ranks agree on
the gradients that are ready on every rank, then exchange some of them. So collectives match across ranks.
"""

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.engine.process_groups import Groups, parent_group, timeout_of
from syncline.train.strategies.base import Context, Synchroniser

_JOIN_S = 3.0
"""Seconds to wait at the end for a thread that an error left inside a collective."""


class BackgroundSynchroniser(Synchroniser):
    """Hands gradients to a thread as they get ready; a subclass says in `exchange_step` how they are averaged.

    `_marked`, `_running`, `_closing` and `_failure` are shared by the training thread, autograd's thread and the
    background thread, under `_changed`.
    """

    def __init__(self, module: nn.Module, context: Context, *, cycle_ms: float) -> None:
        super().__init__(module, context)
        parent = parent_group(context.group)
        self._groups = Groups(parent, timeout_of(parent, None))
        self._groups.open(1)
        self.group = self._groups.rounds[0]
        self.step = 0
        """The step that the thread exchanges."""
        self._cycle_s, self._last_cycle = cycle_ms / 1e3, 0.0
        self._device = self.parameters[0][1].device
        self._events: dict[int, Any] = {}
        """On CUDA: when each gradient of this step is computed, on the stream of the backward pass."""
        self._taken: set[int] = set()
        self._changed = threading.Condition()
        self._marked: set[int] = set()
        self._running = self._closing = False
        self._failure: BaseException | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, number))
            for number, (_, parameter) in enumerate(self.parameters)
        ]
        self._finished: Any = None
        self._thread = threading.Thread(target=self._run, name="gradients", daemon=True)
        self._thread.start()

    def exchange_step(self) -> None:
        """Average all gradients of a step; `ready_everywhere` says which can be sent. In the background thread."""
        raise NotImplementedError

    def ready_everywhere(self, *, wait: bool) -> list[int]:
        """Numbers of gradients that got ready on all ranks since the last call, at most one call per cycle.

        `wait`: there is nothing else to do, so wait for a gradient of this rank first. In the background thread.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closing or self._marked - self._taken)
            if self._closing:
                raise _Closed
        time.sleep(max(0.0, self._last_cycle + self._cycle_s - time.monotonic()))
        self._last_cycle = time.monotonic()
        with self._changed:
            flags = torch.tensor([number in self._marked for number in range(len(self.parameters))], dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._groups.control)
        found = [number for number in flags.nonzero().flatten().tolist() if number not in self._taken]
        self._taken.update(found)
        for number in found if self._events else ():
            torch.cuda.current_stream(self._device).wait_event(self._events[number])
        return found

    @property
    def all_taken(self) -> bool:
        """Whether every gradient of this step was ready on all ranks. In the background thread."""
        return len(self._taken) == len(self.parameters)

    def gradient(self, number: int) -> Tensor:
        """The gradient of a parameter, where all ranks have it ready."""
        gradient = self.parameters[number][1].grad
        assert gradient is not None, self.parameters[number][0]
        return gradient

    def synchronise(self) -> None:
        self.gradients()  # makes those of unused parameters
        begin = self.recorder.mark("wait")
        for number in range(len(self.parameters)):
            self._gradient_ready(number)
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            if self._failure is not None:
                raise self._failure
            self._marked.clear()
        if self._finished is not None:
            torch.cuda.current_stream(self._device).wait_event(self._finished)
        self._events.clear()
        self.recorder.add_blocked(begin, self.recorder.mark("wait"))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        with self._changed:
            self._closing, stuck = True, self._running
            self._changed.notify_all()
        if stuck:  # after an error elsewhere: the thread may wait for a rank that will not come
            self._groups.cut()
            self._groups.cut_agreements()
        self._thread.join(_JOIN_S if stuck else None)
        if not stuck and self._failure is None:
            self._groups.close()

    def _gradient_ready(self, number: int, _: Tensor | None = None) -> None:
        """Mark a gradient. From autograd's thread and from the training thread; a second mark has no effect."""
        with self._changed:
            if number in self._marked or self._failure is not None:
                return
            if self._device.type == "cuda":
                self._events[number] = torch.cuda.current_stream(self._device).record_event()
            self._marked.add(number)
            self._running = True
            self._changed.notify_all()

    def _run(self) -> None:
        """The background thread: one `exchange_step` per step."""
        with torch.no_grad(), self._on_own_stream():
            while self._step_begins():
                try:
                    self.exchange_step()
                    if self._device.type == "cuda":
                        self._finished = torch.cuda.current_stream(self._device).record_event()
                except _Closed:
                    return
                except BaseException as error:
                    self._failure = error
                with self._changed:
                    self._running = False
                    self._changed.notify_all()
                if self._failure is not None:
                    return

    def _step_begins(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._running)
            self._taken.clear()
            self.step = self.recorder.step
            return not self._closing

    def _on_own_stream(self) -> AbstractContextManager[Any]:
        """On CUDA the thread issues its work on a stream of its own, so that it runs beside the backward pass."""
        if self._device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(torch.cuda.Stream(self._device))


class _Closed(Exception):
    """The synchroniser was closed during a step."""
