"""Hooks on a training loop that record its data, forward, loss, backward and update spans, and its steps.

A step lasts from the end of one `optimizer.step()` to the end of the next, so that steps cover all time. The hooks keep
no state that must come in pairs: after an exception in the loop nothing is left half open.
"""

import itertools
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from syncline._compat.autograd import after_backward, in_backward, on_every_backward
from syncline._compat.modules import on_every_batch
from syncline._compat.optimizers import on_every_step
from syncline._compat.replace_function import replace_function
from syncline.trace.record.postprocess import DDP_TAIL
from syncline.trace.record.recorder import Mark, Recorder
from syncline.trace.record.sampling import IntervalChooser, Sampling
from syncline.trace.span import STEP

BETWEEN = "between steps"
"""The name of `between` spans of unknown content: from the end of a step (or pass) to the next forward pass."""
_FOREIGN_CALLS = (
    ("torch", "save", "checkpoint"),
    ("torch.distributed.checkpoint", "save", "checkpoint"),
    ("safetensors.torch", "save_file", "checkpoint"),
    ("logging.Logger", "callHandlers", "logging"),
    ("torch.utils.tensorboard.SummaryWriter", "add_scalar", "logging"),
    ("torch.utils.tensorboard.SummaryWriter", "add_scalars", "logging"),
    ("wandb", "log", "logging"),
    ("mlflow", "log_metrics", "logging"),
)
"""Module or class, function, and the name of the `between` spans around its calls, if the module is loaded."""

_COMPLETION_WAIT_S = 0.2
_NO_END = "a collective has no span, because its end cannot be observed: nobody waited for it before its step ended"


class LoopHooks:
    """The hooks of one process's training loop, and what they know about it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.sampling = Sampling()
        """Which steps are recorded; another thread may replace it."""
        self.interval_chooser: IntervalChooser | None = None
        """Observes the first steps while it is not decided yet which steps are recorded."""
        self.uses_ddp = False
        """Whether backward passes end with DDP's wait for its buckets."""
        self.has_comm_hook = False
        """Whether the buckets go through a comm hook of the user, which hides their launches from us."""
        self.last_gradient: Mark = None
        """When the last gradient of the current backward pass was computed; after it DDP waits for its buckets."""
        self.counts = {"forward": 0, "backward": 0, "update": 0, "exchange": 0}
        """How often each kind of hook did something; `overhead` computes the cost from it."""
        self.notes: list[str] = []
        """What could not be recorded, for the trace."""
        self.last_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        """A step of the loop ends with this optimizer's step."""
        self.on_step_end: Callable[[], None] | None = None
        """Called once, at the end of the next step."""
        self.forward_calls = ForwardCalls()
        """The forward passes under way; one inside another is part of the outer one."""
        self.bucket_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        """Numbers DDP's buckets of the current backward pass, for each process group."""
        self.collective_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        """Numbers the collectives of the current step, for each process group."""
        self.exchanges_started = self.exchanges_ended = 0
        """Another thread counts ends, a little after they happen."""
        self.awaited_works: dict[int, tuple[Any, Callable[[Mark], None]]] = {}
        """By id: collectives whose end is seen only when the loop waits for them, and what adds their span."""
        self.collective_depth = 0
        """Above 0 inside a collective that is recorded as a whole."""
        self._thread = threading.get_ident()
        self._step_start: Mark = recorder.mark(STEP)
        self._idle_since_ns: int = time.perf_counter_ns()
        self._loss_start: Mark = None
        self._backward_end: Mark = None
        self._backward_depth = 0
        self._update_starts: dict[int, Mark] = {}
        self.cleanup = ExitStack()
        """Closing it removes all hooks."""

    def install(self) -> None:
        """Hook every optimizer's steps and every backward pass."""
        self.cleanup.callback(on_every_step(self.before_step, self.after_step))
        self.cleanup.callback(on_every_backward(self.around_backward))
        self.cleanup.callback(on_every_batch(self.around_batch))
        for path, function, name in _FOREIGN_CALLS:
            owner = _loaded(path)
            if hasattr(owner, function):
                self.cleanup.callback(replace_function(owner, function, partial(self.around_call, name)))

    def wait_for_exchanges(self) -> None:
        """Give exchanges a moment whose end was not reported yet."""
        until = time.monotonic() + _COMPLETION_WAIT_S
        while self.exchanges_ended < self.exchanges_started and time.monotonic() < until:
            time.sleep(0.001)

    # Called by hooks:

    def enter_forward(self) -> Mark:
        """A forward pass begins."""
        recorder = self.recorder
        if not recorder.enabled:
            return None
        start = recorder.mark("forward")
        self._thread = threading.get_ident()
        if self._idle_since_ns:
            end = start if isinstance(start, int) else time.perf_counter_ns()
            recorder.add("between", BETWEEN, self._idle_since_ns, end)
        self._idle_since_ns = 0
        self._loss_start = None
        return start

    def leave_forward(self, start: Mark) -> None:
        """A forward pass has ended; from here to the backward pass the loss is computed."""
        recorder = self.recorder
        if not recorder.enabled:
            return
        end = recorder.mark("forward")
        training = torch.is_grad_enabled()
        recorder.add("forward", "forward" if training else "evaluation", start, end)
        self._loss_start = end if training else None
        self.counts["forward"] += 1

    def around_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run and record a backward pass; one inside another (checkpointing) is part of the outer one."""
        # This check comes first, so that compiled code has nothing to guard.
        if torch.compiler.is_compiling() or not self.recorder.enabled or self._backward_depth:
            return backward(*args, **kwargs)
        recorder = self.recorder
        self._backward_depth += 1
        hook = self._mark_last_gradient(args, kwargs)
        start = recorder.mark("backward")
        if self._loss_start is not None:
            recorder.add("forward", "loss", self._loss_start, start)
        self._loss_start = None
        try:
            return backward(*args, **kwargs)
        finally:
            self._backward_depth -= 1
            if hook is not None:
                hook.remove()
            end = recorder.mark("backward")
            last_gradient = self.last_gradient
            recorder.add("backward", "backward", start, end if last_gradient is None else last_gradient)
            if last_gradient is not None:
                recorder.add("backward", DDP_TAIL, last_gradient, end)
            self._backward_end = end
            self._idle_since_ns = end if isinstance(end, int) else time.perf_counter_ns()
            self.counts["backward"] += 1

    def _mark_last_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forget the last backward pass, and mark the moment at which this one has computed its last gradient.

        Only with a comm hook: otherwise the last bucket marks it. Callbacks run in the order in which they were queued,
        and the root's hook runs before all of DDP's.
        """
        self.bucket_numbers.clear()
        self.last_gradient = None
        if not self.has_comm_hook:
            return None
        roots = args[0] if args else kwargs.get("tensors")
        root = next(iter(roots), None) if isinstance(roots, list | tuple) else roots
        if not isinstance(root, torch.Tensor) or root.grad_fn is None:
            return None

        def mark() -> None:
            self.last_gradient = self.recorder.mark("backward")

        return root.register_hook(lambda _: after_backward(mark))

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer's step begins."""
        recorder = self.recorder
        if recorder.enabled:
            start = self._update_starts[id(optimizer)] = recorder.mark("update")
            if self._backward_end is not None:
                recorder.add("update", "before step", self._backward_end, start)
            self._backward_end = None
            self._idle_since_ns = 0

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer's step has ended, and with the last optimizer's step the step of the loop."""
        recorder = self.recorder
        if recorder.enabled:
            recorder.add("update", "update", self._update_starts.pop(id(optimizer), None), recorder.mark("update"))
            self.counts["update"] += 1
            self._idle_since_ns = time.perf_counter_ns()  # another optimizer's forward pass may follow
        last = None if self.last_optimizer is None else self.last_optimizer()
        if last is None:
            self.last_optimizer = weakref.ref(optimizer)
        if last is None or last is optimizer:
            self._end_step()

    def _end_step(self) -> None:
        recorder = self.recorder
        now, sampling = recorder.mark(STEP), self.sampling
        if sampling.keeps(recorder.step):
            recorder.add(STEP, STEP, self._step_start, now)
        recorder.step += 1
        step = recorder.step
        if self.interval_chooser is not None and self.interval_chooser.step_ended(recorder):
            self.interval_chooser = None
        if sampling.every > 1:
            # An engine's exchanges reach into the next step, so the steps before and after are recorded as well.
            margin = 1 if recorder.engines else 0
            recorder.enabled = any(sampling.keeps(number) for number in range(step - margin, step + margin + 1))
            if now is None and recorder.enabled:
                now = recorder.mark(STEP)
        self._step_start = now
        if recorder.enabled:
            self._idle_since_ns = now if isinstance(now, int) else time.perf_counter_ns()
        self._loss_start = self._backward_end = None
        self.collective_numbers.clear()
        if self.awaited_works:
            self.awaited_works.clear()
            if _NO_END not in self.notes:
                self.notes.append(_NO_END)
        if self.on_step_end is not None:
            call, self.on_step_end = self.on_step_end, None
            call()

    def around_batch(self, original: Callable[..., Any], *args: Any) -> Any:
        """A `DataLoader` makes its next batch."""
        return self._timed("data", "data", original, *args)

    def around_call(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Code that is not training: it writes a checkpoint or a log."""
        return self._timed("between", name, original, *args, **kwargs)

    def _timed(self, lane: str, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if torch.compiler.is_compiling() or not recorder.enabled or not self.on_training_thread():
            return original(*args, **kwargs)
        start = recorder.mark(lane)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.add(lane, name, start, recorder.mark(lane))

    def on_training_thread(self) -> bool:
        """Whether this thread runs the loop, or a backward pass of it."""
        return threading.get_ident() == self._thread or in_backward()

    @contextmanager
    def inside_collective(self) -> Iterator[None]:
        """Around a collective that is recorded as a whole: the waits inside are part of it."""
        self.collective_depth += 1
        try:
            yield
        finally:
            self.collective_depth -= 1


def _loaded(path: str) -> Any:
    """The module, or the class of a module, with this name; None if nobody has imported it."""
    if path in sys.modules:
        return sys.modules[path]
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


class ForwardCalls(threading.local):
    """One thread's nested forward passes: how deep they are, and when and in which step the outermost one began."""

    depth = step = 0
    start: Mark = None


class TimedLoader:
    """A data loader whose batches are recorded as `data` spans; everything else is passed on to the loader."""

    def __init__(self, recorder: Callable[[], Recorder | None], loader: Iterable[Any]) -> None:
        self._recorder, self._loader = recorder, loader

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._loader)
        while True:
            recorder = self._recorder()
            start = recorder.mark("data") if recorder is not None else None
            try:
                item = next(items)
            except StopIteration:
                return
            if recorder is not None:
                recorder.add("data", "data", start, recorder.mark("data"))
            yield item

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying asks for these before there is a loader
            raise AttributeError(name)
        return getattr(self._loader, name)
