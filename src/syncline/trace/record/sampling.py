"""Sampling of steps: the interval between recorded steps, chosen from the first steps and shared by all ranks.

Without a user's choice all of the first steps are recorded. They show how many spans a step has and how long it takes,
and the interval is chosen so that recording stays below a share of the training time.
"""

import json
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

from syncline._compat.groups import Store
from syncline.trace.record.recorder import Recorder

BUDGET = 0.003
"""Share of the time that recording may take by its own count; measured from outside it is well below 1%."""
FIRST, OBSERVED = 20, 10
"""How many first steps are all recorded, and how many of them, the last ones, decide the interval."""
_AHEAD, _AHEAD_NS = 10, 500_000_000
"""From the decision to the first step that may be skipped, steps or time, the longer: all ranks know it by then."""

# Above the host time that recordings of ResNet-50 counted for themselves on an H200: 1.0 ms with 12 spans per step
# (DDP), 2.3 ms with 88 (attached), see benchmarks/results/recorder-h200.json. A GPU-bound step hides most of it.
_SPAN_NS, _STEP_NS = 20e3, 0.85e6
_ENGINE_STEPS = 3  # with an engine the steps before and after a sampled one are recorded as well

_KEY = "sampling"
_FIRST_POLL_S, _MAX_POLL_S, _JOIN_S = 0.02, 1.0, 1.0


def sampling_interval(*, spans: float, step_ns: float, engine: bool) -> int:
    """The smallest n for which recording every n-th step stays within the budget.

    spans: spans per step. step_ns: duration of a step. engine: whether a model is attached.

    >>> sampling_interval(spans=12, step_ns=61e6, engine=False), sampling_interval(spans=88, step_ns=64e6, engine=True)
    (6, 41)
    """
    cost = (spans * _SPAN_NS + _STEP_NS) * (_ENGINE_STEPS if engine else 1)
    return max(1, math.ceil(cost / (BUDGET * step_ns))) if step_ns > 0 else 1


@dataclass(frozen=True)
class Sampling:
    """Which steps are recorded: all before `since`, then every step that `every` divides. The same on every rank."""

    every: int = 1
    since: int = 0

    def keeps(self, step: int) -> bool:
        """Whether a step is recorded."""
        return step < self.since or step % self.every == 0

    def effective_interval(self, steps: int) -> int:
        """Effective sampling interval after `steps` steps."""
        return self.every if steps > self.since else 1


class IntervalChooser:
    """Chooses the interval from the first steps by the host's clock, and calls `decide` after the last of them."""

    def __init__(self, decide: Callable[[Sampling], None]) -> None:
        self._decide = decide
        self._ends: list[int] = []
        self._spans_before = 0

    def step_ended(self, recorder: Recorder) -> bool:
        """A step has ended, and `recorder.step` is the next one. Whether the interval was decided now."""
        if recorder.step < FIRST - OBSERVED:
            return False
        if not self._ends:
            self._spans_before = recorder.counts()[0]
        self._ends.append(time.perf_counter_ns())
        if recorder.step < FIRST:
            return False
        step_ns = statistics.median(end - begin for begin, end in pairwise(self._ends))
        spans = (recorder.counts()[0] - self._spans_before) / OBSERVED
        every = sampling_interval(spans=spans, step_ns=step_ns, engine=recorder.engines > 0)
        self._decide(Sampling(every, since=FIRST + max(_AHEAD, math.ceil(_AHEAD_NS / max(step_ns, 1)))))
        return True


class SharedSampling:
    """A short-lived thread that passes rank 0's sampling to the other ranks through the store.

    The loop does not wait for the store, which may be slow. A rank that learns the sampling late has recorded more
    steps than the others until then, never fewer.
    """

    def __init__(self, store: Store, mine: Sampling | None, use: Callable[[Sampling], None]) -> None:
        """Publish `mine`; where it is None, look for rank 0's and `use` it."""
        self._closed = threading.Event()
        arguments = (store, mine, use)
        self._thread = threading.Thread(target=self._run, args=arguments, name="syncline-sampling", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop using the store."""
        self._closed.set()
        self._thread.join(_JOIN_S)

    def _run(self, store: Store, mine: Sampling | None, use: Callable[[Sampling], None]) -> None:
        try:
            if mine is not None:
                store.set(_KEY, json.dumps(asdict(mine)))
                return
            wait_s = _FIRST_POLL_S
            # Polls, because the store's own wait blocks other threads that use the store.
            while not store.check([_KEY]):
                if self._closed.wait(wait_s):
                    return
                wait_s = min(1.5 * wait_s, _MAX_POLL_S)
            use(Sampling(**json.loads(store.get(_KEY))))
        except (RuntimeError, ValueError, OSError):
            return  # the store is gone: this rank continues as before, and the end of the recording reports it
