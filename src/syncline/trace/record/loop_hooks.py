"""What hooks see of a training loop, as spans: forward, loss, backward, update, what lies between, and the steps.

A step reaches from the end of one `optimizer.step()` to the end of the next, so that steps tile the time. Whatever the
loop does in it, hooks hold no state that must come in pairs: an exception leaves nothing half open.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from syncline._compat import after_backward, on_every_backward, on_every_step
from syncline.trace.record.postprocess import DDP_TAIL
from syncline.trace.record.recorder import Recorder
from syncline.trace.record.sampling import Pace, Sampling
from syncline.trace.span import STEP

BETWEEN = "between steps"
"""The name of `data` spans that were not seen: from the end of a step (or pass) to the next forward."""

_MOMENT_S = 0.2


class Watch:
    """The loop of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.sampling = Sampling()
        """Which steps are recorded; another thread may say so."""
        self.pace: Pace | None = None
        """Looks at the first steps, where it is not decided yet which are to be recorded."""
        self.ddp = False
        """Whether backward passes end with DDP's wait for its buckets."""
        self.own_hook = False
        """Whether the buckets go through a comm hook of the user's: then their launches are not seen."""
        self.computed: Any = None
        """When the last gradient was there, in the backward pass under way; after it DDP waits for its buckets."""
        self.counts = {"forward": 0, "backward": 0, "update": 0, "exchange": 0}
        """How often each kind of hook has done something: what they cost is counted by it."""
        self.notes: list[str] = []
        """What could not be seen, for the trace."""
        self.explicit = False
        """Whether the loop's data are seen, and need not be guessed."""
        self.buckets: dict[str, int] = {}
        self.collectives: dict[str, int] = {}
        """How many of a backward pass, and of a step, there were, by their process group."""
        self.launched = self.landed = 0
        """Exchanges that were begun, and those whose end was seen: another thread says so, a little later."""
        self._begin: Any = recorder.mark(STEP)
        self._gap: int = time.perf_counter_ns()
        self._loss_from: Any = None
        self._stepped_from: Any = None
        self._depth = 0
        self._ends: weakref.ref[torch.optim.Optimizer] | None = None
        self._updates: dict[int, Any] = {}
        self._removes: list[Callable[[], None]] = []

    def open(self) -> None:
        """See every optimizer's steps and every backward pass."""
        self._removes.append(on_every_step(self.before_step, self.after_step))
        self._removes.append(on_every_backward(self.around_backward))

    def until_closed(self, remove: Callable[[], None]) -> None:
        """Have something undone with the hooks."""
        self._removes.append(remove)

    def land(self) -> None:
        """Give exchanges whose end is not told yet a moment."""
        until = time.monotonic() + _MOMENT_S
        while self.landed < self.launched and time.monotonic() < until:
            time.sleep(0.001)

    def close(self) -> None:
        """Take all hooks away."""
        removes, self._removes = self._removes, []
        for remove in reversed(removes):
            remove()

    def ends_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """The step of this optimizer ends a step of the loop."""
        self._ends = weakref.ref(optimizer)

    on_step: Callable[[], None] | None = None
    """Called once, at the end of the next step."""

    # -- what hooks call

    def enter_forward(self) -> Any:
        """A forward pass begins."""
        recorder = self.recorder
        if not recorder.enabled:
            return None
        start = recorder.mark("forward")
        if self._gap and not self.explicit:
            recorder.add("data", BETWEEN, self._gap, start if isinstance(start, int) else time.perf_counter_ns())
        self._gap = 0
        self._loss_from = None
        return start

    def leave_forward(self, start: Any) -> None:
        """A forward pass has ended; what comes until the backward pass is the loss."""
        recorder = self.recorder
        if not recorder.enabled:
            return
        end = recorder.mark("forward")
        training = torch.is_grad_enabled()
        recorder.add("forward", "forward" if training else "evaluation", start, end)
        self._loss_from = end if training else None
        self.counts["forward"] += 1

    def around_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A backward pass; one that runs inside another (checkpointing) is a part of it."""
        # First of all, so that compiled code has nothing to guard.
        if torch.compiler.is_compiling() or not self.recorder.enabled or self._depth:
            return backward(*args, **kwargs)
        recorder = self.recorder
        self._depth += 1
        self.buckets.clear()
        self.computed = None
        hook = self._note_end(args, kwargs) if self.own_hook else None
        start = recorder.mark("backward")
        if self._loss_from is not None:
            recorder.add("forward", "loss", self._loss_from, start)
        self._loss_from = None
        try:
            return backward(*args, **kwargs)
        finally:
            self._depth -= 1
            if hook is not None:
                hook.remove()
            end = recorder.mark("backward")
            computed = self.computed
            recorder.add("backward", "backward", start, end if computed is None else computed)
            if computed is not None:
                recorder.add("backward", DDP_TAIL, computed, end)
            self._stepped_from = end
            self._gap = end if isinstance(end, int) else time.perf_counter_ns()
            self.counts["backward"] += 1

    def _note_end(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mark the moment at which the last gradient is there.

        What is queued first is called first, and the root's hook comes before all of DDP's.
        """
        roots = args[0] if args else kwargs.get("tensors")
        root = next(iter(roots), None) if isinstance(roots, list | tuple) else roots
        if not isinstance(root, torch.Tensor) or root.grad_fn is None:
            return None

        def computed() -> None:
            self.computed = self.recorder.mark("backward")

        return root.register_hook(lambda _: after_backward(computed))

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to step."""
        recorder = self.recorder
        if recorder.enabled:
            start = self._updates[id(optimizer)] = recorder.mark("update")
            if self._stepped_from is not None:
                recorder.add("update", "before step", self._stepped_from, start)
            self._stepped_from = None
            self._gap = 0

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped: unless another one is to come, the step has ended."""
        recorder = self.recorder
        if recorder.enabled:
            recorder.add("update", "update", self._updates.pop(id(optimizer), None), recorder.mark("update"))
            self.counts["update"] += 1
            self._gap = time.perf_counter_ns()  # another optimizer's forward may follow
        last = None if self._ends is None else self._ends()
        if last is None:
            self.ends_steps(optimizer)
        if last is None or last is optimizer:
            self._end_step()

    def _end_step(self) -> None:
        recorder = self.recorder
        now, sampling = recorder.mark(STEP), self.sampling
        if sampling.keeps(recorder.step):
            recorder.add(STEP, STEP, self._begin, now)
        recorder.step += 1
        step = recorder.step
        if self.pace is not None and self.pace.ended(recorder):
            self.pace = None
        if sampling.every > 1:
            # An engine's work reaches from one step into the next: those before and behind are watched, too.
            margin = 1 if recorder.engines else 0
            recorder.enabled = any(sampling.keeps(number) for number in range(step - margin, step + margin + 1))
            if now is None and recorder.enabled:
                now = recorder.mark(STEP)
        self._begin = now
        if recorder.enabled:
            self._gap = now if isinstance(now, int) else time.perf_counter_ns()
        self._loss_from = self._stepped_from = None
        self.collectives.clear()
        if self.on_step is not None:
            call, self.on_step = self.on_step, None
            call()

    def interrupt(self) -> None:
        """A collective begins outside of the passes: what was guessed around it is no data, loss or update."""
        if self._gap and not self.explicit and not self._depth:
            self.recorder.add("data", BETWEEN, self._gap, time.perf_counter_ns())
        self._loss_from = self._stepped_from = None

    def resume(self) -> None:
        """The collective's call has returned."""
        if self._gap:
            self._gap = time.perf_counter_ns()
