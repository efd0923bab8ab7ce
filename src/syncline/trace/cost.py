"""What recording costs: the recorder's own calls, timed after the run and counted over it."""

import time
from typing import Any

from syncline.trace.recorder import Recorder
from syncline.trace.span import STEP

_CALLS, _ROUNDS = 200, 5


def facts(recorder: Recorder, *, every: int = 1, hooks_ns: float = 0.0) -> dict[str, Any]:
    """The entry `recorder` of a trace's metadata; `hooks_ns` is what hooks around its calls took, in all."""
    spans, steps = recorder.counts()
    span_ns, step_ns = call_costs(recorder.device)
    whole = spans * span_ns + steps * step_ns + hooks_ns
    return {
        "overhead_ns_per_step": round(whole / steps, 1) if steps else 0.0,
        "spans_per_step": round(spans / steps, 2) if steps else 0.0,
        "every": every,
        "dropped": recorder.dropped,
    }


def call_costs(device: Any) -> tuple[float, float]:
    """Nanoseconds of the host for a span (two marks, one entry), and for a step's; the median of a few rounds."""
    scratch = Recorder(device=device, base=False)
    return _median(scratch, "forward"), _median(scratch, STEP)


def _median(scratch: Recorder, lane: str) -> float:
    rounds = sorted(_round(scratch, lane) for _ in range(_ROUNDS))
    return rounds[_ROUNDS // 2]


def _round(scratch: Recorder, lane: str) -> float:
    begin = time.thread_time_ns()  # other programs on this machine are not its cost
    for _ in range(_CALLS):
        start = scratch.mark(lane)
        scratch.add(lane, lane, start, scratch.mark(lane))
    return (time.thread_time_ns() - begin) / _CALLS
