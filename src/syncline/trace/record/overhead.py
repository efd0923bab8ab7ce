"""What recording costs: the recorder's own calls, timed after the run and counted over it.

In a training loop such a call finds nothing of its own in the caches, which makes it many times dearer than in a loop
of such calls alone: so memory is swept before each timing.
"""

import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from syncline.trace.record.recorder import Recorder
from syncline.trace.span import STEP

_PASS_BYTES, _UNIT_BYTES, _ROUNDS = 1 << 26, 1 << 23, 5
"""What comes between two calls: a pass over the model, more than caches hold; or the work on one unit."""


def facts(
    recorder: Recorder, *, every: int = 1, hooks_ns: float = 0.0, by_hooks: tuple[float, float] = (0, 0)
) -> dict[str, Any]:
    """The entry `recorder` of a trace's metadata.

    `hooks_ns` is what hooks took in all, and `by_hooks` the spans and steps that they filed in that time.
    """
    spans, steps = recorder.counts()
    span_ns, step_ns = call_costs(recorder.device)
    rest = max(0.0, spans - by_hooks[0]) * span_ns + max(0.0, steps - by_hooks[1]) * step_ns
    return {
        "overhead_ns_per_step": round((rest + hooks_ns) / steps, 1) if steps else 0.0,
        "spans_per_step": round(spans / steps, 2) if steps else 0.0,
        "every": every,
        "dropped": recorder.dropped,
    }


def unknown(recorder: Recorder, *, every: int) -> dict[str, Any]:
    """The same entry where the cost could not be told."""
    spans, steps = recorder.counts()
    per_step = round(spans / steps, 2) if steps else 0.0
    return {"overhead_ns_per_step": None, "spans_per_step": per_step, "every": every, "dropped": recorder.dropped}


@lru_cache(maxsize=8)
def call_costs(device: torch.device) -> tuple[float, float]:
    """Nanoseconds of the host for a span (two marks, one entry), and for a step's."""
    scratch = Recorder(device=device, base=False)

    def file(lane: str) -> None:
        start = scratch.mark(lane)
        scratch.add(lane, lane, start, scratch.mark(lane))

    return cold_ns(lambda: file("forward"), swept_bytes=_UNIT_BYTES), cold_ns(lambda: file(STEP))


def cold_ns(
    call: Callable[[], object], without: Callable[[], object] | None = None, *, swept_bytes: int = _PASS_BYTES
) -> float:
    """Nanoseconds of this thread for a call, less those of another, with the caches full of other things.

    Other programs on this machine are not its cost, so it is the thread's time and not the wall's.
    """
    swept = torch.zeros(swept_bytes // 4)
    call()
    rounds = [_once(call, swept) - (0 if without is None else _once(without, swept)) for _ in range(_ROUNDS)]
    return max(0.0, float(statistics.median(rounds)))


def _once(call: Callable[[], object], swept: torch.Tensor) -> int:
    swept.add_(1)
    begin = time.thread_time_ns()
    call()
    return time.thread_time_ns() - begin
