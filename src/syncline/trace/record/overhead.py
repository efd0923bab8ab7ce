"""Cost of recording: its calls and hooks are timed after the run and multiplied by how often they were called.

In a training loop such a call finds none of its code and data in the caches, which makes it many times slower than in a
loop of such calls alone. So memory is swept before each timing.
"""

import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from syncline.trace.record.collectives import RecordingGroup
from syncline.trace.record.loop_hooks import LoopHooks
from syncline.trace.record.module_hooks import hook_module
from syncline.trace.record.recorder import Recorder
from syncline.trace.span import STEP

_PASS_BYTES, _UNIT_BYTES, _ROUNDS = 1 << 26, 1 << 23, 5
"""Memory swept between two calls: for a pass over the model, more than caches hold; for the work on one unit."""

_Calls = tuple[Callable[[], object], Callable[[], object] | None]
"""A call with hooks, and the same call without them; None where that costs next to nothing."""


def recording_cost(recorder: Recorder, *, every: int = 1, hooks: LoopHooks | None = None) -> dict[str, Any]:
    """The entry `recorder` of a trace's metadata, with the host time that recording a step took."""
    entry = recording_counts(recorder, every=every)
    spans, steps = recorder.counts()
    total_ns, other_spans, other_steps = 0.0, float(spans), float(steps)
    if hooks is not None:
        for kind, count in hooks.counts.items():
            if count:
                # The spans that a hook adds are part of its own cost.
                hook_ns, hook_spans, hook_steps = _hook_cost(kind, recorder.device, hooks.has_comm_hook)
                total_ns += count * hook_ns
                other_spans -= count * hook_spans
                other_steps -= count * hook_steps
    span_ns, step_ns = _span_costs(recorder.device)
    total_ns += max(0.0, other_spans) * span_ns + max(0.0, other_steps) * step_ns
    return {**entry, "overhead_ns_per_step": round(total_ns / steps, 1) if steps else 0.0}


def recording_counts(recorder: Recorder, *, every: int) -> dict[str, Any]:
    """The same entry where the cost is not known: it is None."""
    spans, steps = recorder.counts()
    per_step = round(spans / steps, 2) if steps else 0.0
    return {"overhead_ns_per_step": None, "spans_per_step": per_step, "every": every, "dropped": recorder.dropped}


@lru_cache(maxsize=8)
def _span_costs(device: torch.device) -> tuple[float, float]:
    """Host nanoseconds for a span (two marks and one `add`), and for the span of a step."""
    scratch = Recorder(device=device, start_clock=False)

    def record(lane: str) -> None:
        start = scratch.mark(lane)
        scratch.add(lane, lane, start, scratch.mark(lane))

    return _cold_ns(lambda: record("forward"), swept_bytes=_UNIT_BYTES), _cold_ns(lambda: record(STEP))


@lru_cache(maxsize=32)
def _hook_cost(kind: str, device: torch.device, has_comm_hook: bool) -> tuple[float, float, float]:
    """Host nanoseconds of one call of a hook, and the spans and steps that it adds."""
    hooks = LoopHooks(Recorder(device=device, start_clock=False))
    hooks.has_comm_hook = has_comm_hook
    # The recording may end where gradients are off.
    with torch.inference_mode(False), torch.enable_grad():
        with_hooks, without = _HOOK_CALLS[kind](hooks)
        with_hooks()
        spans, steps = hooks.recorder.counts()
        return _cold_ns(with_hooks, without), spans, steps


def _forward(hooks: LoopHooks) -> _Calls:
    plain, hooked = nn.Identity(), nn.Identity()
    hook_module(hooks, hooked)
    return lambda: hooked(None), lambda: plain(None)


def _backward(hooks: LoopHooks) -> _Calls:
    root = torch.ones((), requires_grad=True) * 1

    def plain() -> None:
        torch.autograd.backward(root, retain_graph=True)

    def hooked() -> None:
        hooks.around_backward(torch.autograd.backward, root, retain_graph=True)

    return hooked, plain


def _update(hooks: LoopHooks) -> _Calls:
    optimizer: Any = torch.optim.SGD([torch.ones(1)])

    def hooked() -> None:
        hooks.before_step(optimizer)
        hooks.after_step(optimizer)

    return hooked, None


def _exchange(hooks: LoopHooks) -> _Calls:
    group, tensors = RecordingGroup(hooks, _InstantGroup()), [torch.ones(1)]
    return lambda: group.allreduce(tensors), None


_HOOK_CALLS = {"forward": _forward, "backward": _backward, "update": _update, "exchange": _exchange}


class _InstantGroup:
    """A group of one rank whose collectives complete at once."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: Any, options: Any = None) -> "_InstantGroup":
        return self

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


def _cold_ns(
    call: Callable[[], object], without: Callable[[], object] | None = None, *, swept_bytes: int = _PASS_BYTES
) -> float:
    """Nanoseconds of this thread for a call, less those of another, with caches full of other data.

    It is the thread's time and not wall time, because other programs on this machine are not part of the cost.
    """
    swept = torch.zeros(swept_bytes // 4)

    def once(call: Callable[[], object]) -> int:
        swept.add_(1)
        begin = time.thread_time_ns()
        call()
        return time.thread_time_ns() - begin

    call()
    rounds = [once(call) - (0 if without is None else once(without)) for _ in range(_ROUNDS)]
    return max(0.0, float(statistics.median(rounds)))
