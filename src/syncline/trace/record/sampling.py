"""How seldom steps are recorded where nobody said it: so that recording stays below a share of the training's time.

The first steps are all recorded, and say how many spans a step has and how long it takes.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from syncline.trace.record.recorder import Recorder

BUDGET = 0.003
"""What recording may take of the time, by what it counts of itself; all in all that is well below 1%."""
FIRST, LOOK = 20, 10
"""Steps that are all recorded before it is decided, and how many of them, the last ones, it is decided from."""
_AHEAD, _AHEAD_NS = 10, 500_000_000
"""From the decision to the first step that may be left out, the longer of the two: so that all ranks know by then."""

# Above the host's time that recordings of ResNet-50 counted of themselves beside an H200: 1.0 ms with 12 spans a step
# (DDP), 2.3 ms with 88 (attached), see benchmarks/results/recorder-h200.json. A GPU that is the bound hides most of it.
_SPAN_NS, _STEP_NS = 20e3, 0.85e6
_ENGINE_STEPS = 3  # an engine is watched in the steps before and behind as well


def spacing(*, spans: float, step_ns: float, engine: bool) -> int:
    """Record each n-th step: the n that keeps recording below the budget.

    spans: filed in a step. step_ns: how long one takes. engine: whether a model is attached.

    >>> spacing(spans=12, step_ns=61e6, engine=False), spacing(spans=88, step_ns=64e6, engine=True)
    (6, 41)
    """
    cost = (spans * _SPAN_NS + _STEP_NS) * (_ENGINE_STEPS if engine else 1)
    return max(1, math.ceil(cost / (BUDGET * step_ns))) if step_ns > 0 else 1


@dataclass(frozen=True)
class Sampling:
    """All steps before `since` are recorded, and from there on those that `every` divides: the same on every rank."""

    every: int = 1
    since: int = 0

    def keeps(self, step: int) -> bool:
        """Whether a step is one of those that are recorded."""
        return step < self.since or step % self.every == 0

    def used(self, steps: int) -> int:
        """Each how manieth of so many steps was recorded in the end."""
        return self.every if steps > self.since else 1


class Pace:
    """The first steps of a recording, by the host's clock; `decide` is called once, at the end of the last of them."""

    def __init__(self, decide: Callable[[Sampling], None]) -> None:
        self._decide = decide
        self._ends: list[int] = []
        self._spans = 0

    def ended(self, recorder: Recorder) -> bool:
        """A step has ended, and `recorder.step` is the next; whether it was the last one to look at."""
        if recorder.step < FIRST - LOOK:
            return False
        if not self._ends:
            self._spans = recorder.counts()[0]
        self._ends.append(time.perf_counter_ns())
        if recorder.step < FIRST:
            return False
        step_ns = statistics.median(end - begin for begin, end in pairwise(self._ends))
        spans = (recorder.counts()[0] - self._spans) / LOOK
        every = spacing(spans=spans, step_ns=step_ns, engine=recorder.engines > 0)
        self._decide(Sampling(every, since=FIRST + max(_AHEAD, math.ceil(_AHEAD_NS / max(step_ns, 1)))))
        return True
