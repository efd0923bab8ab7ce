"""Cost of recording: its calls and hooks are timed after the run and multiplied by how often they were called.

In a training loop such a call finds none of its code and data in the caches, which makes it many times slower than in a
loop of such calls alone. So memory is swept before each timing.
"""

import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from syncline.trace.record.collectives import RecordingGroup
from syncline.trace.record.gather import first_line
from syncline.trace.record.loop_hooks import LoopHooks
from syncline.trace.record.module_hooks import hook_module
from syncline.trace.record.recorder import Recorder
from syncline.trace.span import STEP

_PASS_BYTES, _UNIT_BYTES, _ROUNDS = 1 << 26, 1 << 23, 5
"""Memory swept between two calls: for a pass over the model, more than caches hold; for the work on one unit."""


def recording_cost(
    recorder: Recorder, *, every: int = 1, hooks: LoopHooks | None = None, timed: bool = True
) -> dict[str, Any]:
    """The entry `recorder` of a trace's metadata, with the host time that recording a step took; None if not `timed`.

    In whatever state a loop has left torch, the trace is written: if hooks cannot be timed, the cost is None and noted.
    """
    spans, steps = recorder.counts()
    cost: float | None = 0.0 if timed else None
    try:
        if steps and timed:
            cost = round(_total_ns(recorder, hooks) / steps, 1)
    except Exception as error:
        if hooks is None:
            raise
        cost = None
        hooks.notes.append(f"the cost of recording is not known: {type(error).__name__}: {first_line(error)}")
    per_step = round(spans / steps, 2) if steps else 0.0
    return {"overhead_ns_per_step": cost, "spans_per_step": per_step, "every": every, "dropped": recorder.dropped}


def _total_ns(recorder: Recorder, hooks: LoopHooks | None) -> float:
    spans, steps = recorder.counts()
    has_comm_hook = hooks is not None and hooks.has_comm_hook
    total_ns, other_spans, other_steps = 0.0, spans, steps
    for kind, count in hooks.counts.items() if hooks is not None else ():
        if count:
            # The spans that a hook adds are part of its own cost.
            hook_ns, hook_spans, hook_steps = _call_cost(kind, recorder.device, has_comm_hook)
            total_ns += count * hook_ns
            other_spans -= count * hook_spans
            other_steps -= count * hook_steps
    for kind, count in (("span", other_spans), (STEP, other_steps)):
        total_ns += max(0, count) * _call_cost(kind, recorder.device, has_comm_hook)[0]
    return total_ns


@lru_cache(maxsize=32)
def _call_cost(kind: str, device: torch.device, has_comm_hook: bool) -> tuple[float, int, int]:
    """Nanoseconds of this thread for one call, and the spans and steps that it adds.

    The caches are full of other data. It is the thread's time and not wall time, because other programs on this machine
    are not part of the cost.
    """
    hooks = LoopHooks(Recorder(device=device, start_clock=False))
    hooks.has_comm_hook = has_comm_hook
    # The recording may end where gradients are off.
    with torch.inference_mode(False), torch.enable_grad():
        swept = torch.zeros((_UNIT_BYTES if kind == "span" else _PASS_BYTES) // 4)
        call = _calls(hooks)[kind]
        call()
        spans, steps = hooks.recorder.counts()
        times = []
        for _ in range(_ROUNDS):
            swept.add_(1)
            begin = time.thread_time_ns()
            call()
            times.append(time.thread_time_ns() - begin)
    return float(statistics.median(times)), spans, steps


def _calls(hooks: LoopHooks) -> dict[str, Callable[[], object]]:
    """By kind: what recording adds to a training loop."""
    recorder, module, optimizer = hooks.recorder, nn.Identity(), torch.optim.SGD([torch.ones(1)])
    hook_module(hooks, module)
    root, tensors = torch.ones((), requires_grad=True) * 1, [torch.ones(1)]
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    completed = SimpleNamespace(get_future=lambda: future)
    group = RecordingGroup(hooks, SimpleNamespace(rank=lambda: 0, size=lambda: 1, allreduce=lambda *_: completed))

    def span(lane: str) -> None:
        start = recorder.mark(lane)
        recorder.add(lane, lane, start, recorder.mark(lane))

    def update() -> None:
        hooks.before_step(optimizer)
        hooks.after_step(optimizer)

    return {
        "span": lambda: span("forward"),
        STEP: lambda: span(STEP),
        "forward": lambda: module(None),
        "backward": lambda: hooks.around_backward(lambda _: None, root),
        "update": update,
        "exchange": lambda: group.allreduce(tensors),
    }
