"""The recorder: a bounded ring buffer of one rank's spans. Host spans read a clock, CUDA spans are pairs of events."""

import time
from collections import deque
from itertools import islice
from typing import Any

import torch

from syncline.trace.record.cpu_time import MAX_STEPS, StepCpuTimes
from syncline.trace.record.cuda_clock import CudaClock
from syncline.trace.record.postprocess import cut_blocked
from syncline.trace.span import BLOCKED, ISSUING, STEP, Span

Mark = int | torch.cuda.Event | None
"""A moment: host nanoseconds, a CUDA event, or None while nothing is recorded."""
_Row = tuple[str, str, str, int, Any, Any, int, str]  # both marks are integers, or both are events

HOST_LANES = frozenset({"data", "between", "wait"})
"""Lanes of the host's own time. Their spans use the host's clock even when the other lanes' work is on a GPU."""

_CHUNK = 1024


class Recorder:
    """Keeps the last `capacity` spans of a rank; older ones are dropped and counted.

    On CUDA a span is a pair of events on the current stream: recording never synchronises, and `spans()` reads the
    times after the work has finished. `start_clock=False` omits the one synchronisation that ties the GPU's clock to
    the host's: then spans can be added but not read until `restart`.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        capacity: int = 200_000,
        device: torch.device | str = "cpu",
        enabled: bool = True,
        start_clock: bool = True,
    ) -> None:
        self.rank = rank
        self.device = torch.device(device)
        self.step = 0
        self.enabled = enabled
        self.dropped = 0
        self.engines = 0
        """How many engines add their spans here."""
        self.engine_group = ""
        """The process group of exchanges that do not name theirs: the engines'."""
        self.cpu_times = StepCpuTimes()
        """CPU time of each step; marks of the lane `step` start and end it."""
        self._rows: deque[_Row] = deque(maxlen=capacity)
        self._steps: deque[_Row] = deque(maxlen=MAX_STEPS)
        self._step_count = self._anchored_count = 0
        self._restarted_ns = 0
        self._cuda = CudaClock(self.device) if self.device.type == "cuda" else None
        if self._cuda is not None and start_clock:
            self._cuda.start()

    def mark(self, lane: str = "forward") -> Mark:
        """The current moment on the clock that `lane` uses; None while nothing is recorded."""
        if not self.enabled:
            return None
        if lane == STEP:
            self.cpu_times.sample()
        return self._now(lane)

    def _now(self, lane: str) -> Mark:
        if self._cuda is not None and lane not in HOST_LANES:
            return self._cuda.mark()
        return time.perf_counter_ns()

    def mark_completion(self, future: "torch.futures.Future[Any]", device: torch.device, queue: str = "") -> Mark:
        """The moment at which a GPU will have finished the work of `future`; None on CPU (`CudaClock`)."""
        return None if self._cuda is None else self._cuda.mark_completion(future, device, queue)

    def add(
        self,
        lane: str,
        name: str,
        start: Mark,
        end: Mark,
        *,
        unit: str = "",
        bytes: int = 0,
        step: int = -1,
        group: str | None = None,
    ) -> None:
        """Add a span between two marks; `step` defaults to the current one, `group` to that of the engines.

        Nothing is added where a mark is None: it was taken while nothing was recorded.
        """
        if not self.enabled or start is None or end is None:
            return
        row = (lane, name, unit, self.step if step < 0 else step, start, end, bytes, self._group(lane, group))
        if lane == STEP:
            self._steps.append(row)  # in a buffer of their own, so that no step time is dropped with other spans
            self._step_count += 1
            self.cpu_times.add(row[3])
            return
        if len(self._rows) == self._rows.maxlen:
            self.dropped += 1
        self._rows.append(row)

    def add_ending_now(
        self, lane: str, name: str, start: Mark, *, unit: str, bytes: int, step: int, group: str | None = None
    ) -> None:
        """Add a span that ends now. Works from other threads, and shortly after recording was switched off."""
        if start is None or (isinstance(start, int) and start < self._restarted_ns):
            return
        end = self._now(lane)
        if end is not None:
            self.dropped += len(self._rows) == self._rows.maxlen
            self._rows.append((lane, name, unit, step, start, end, bytes, self._group(lane, group)))

    def _group(self, lane: str, given: str | None) -> str:
        return given if given is not None else self.engine_group if lane == "exchange" else ""

    def add_blocked(self, start: Mark, end: Mark, *, unit: str = "") -> None:
        """The training thread (on CUDA: its stream) was blocked, so it did no forward, backward or data work."""
        self.add("wait", BLOCKED, start, end, unit=unit)

    def add_issuing(self, start: Mark) -> None:
        """The training thread has packed, started or unpacked a message since `start`, a mark of the lane `wait`.

        Not where a GPU computes: there the host's time counts only while the GPU has nothing to do.
        """
        if self._cuda is None:
            self.add("wait", ISSUING, start, self.mark("wait"))

    def span(self, lane: str, name: str = "", *, unit: str = "", bytes: int = 0) -> "SpanBlock":
        """Context manager that adds the span of its block."""
        return SpanBlock(self, lane, name or lane, unit, bytes)

    def restart(self, *, rank: int = 0) -> None:
        """Forget everything and record from step 0 on. On CUDA this synchronises once."""
        self.rank, self.step, self.dropped = rank, 0, 0
        self._rows.clear()
        self._steps.clear()
        self._step_count = self._anchored_count = 0
        self._restarted_ns = time.perf_counter_ns()
        self.cpu_times.close()
        self.cpu_times = StepCpuTimes()
        if self._cuda is not None:
            self._cuda.start()
        self.enabled = True

    def counts(self) -> tuple[int, int]:
        """The number of spans added so far, dropped ones included, and the number of steps."""
        return len(self._rows) + self.dropped, self._step_count

    def last_steps(self, count: int) -> list[int]:
        """The numbers of the last recorded steps, in order."""
        return [row[3] for row in islice(reversed(self._steps), count)][::-1]

    @property
    def first_complete_step(self) -> int:
        """The first step of which no span was dropped."""
        return self._rows[0][3] + 1 if self.dropped else 0

    def spans(self, first_step: int = 0) -> list[Span]:
        """The kept spans of steps from `first_step` on, step spans last. On CUDA this waits for the events it reads."""
        if self._cuda is not None:
            new, self._anchored_count = self._step_count - self._anchored_count, self._step_count
            self._cuda.add_anchors((row[3], row[4]) for row in reversed(list(islice(reversed(self._steps), new))))
        rows = [*_rows_from(self._rows, first_step), *_rows_from(self._steps, first_step)]
        return cut_blocked(
            [
                Span(self.rank, lane, name, unit, step, *self._times(start, end, step), size, group)
                for lane, name, unit, step, start, end, size, group in rows
            ]
        )

    def lane_ns(self, first_step: int) -> dict[int, dict[str, int]]:
        """Nanoseconds by lane of every step from `first_step` on, for log lines."""
        totals: dict[int, dict[str, int]] = {}
        for span in self.spans(first_step):
            lanes = totals.setdefault(span.step, {})
            lanes[span.lane] = lanes.get(span.lane, 0) + span.end - span.start
        return totals

    def _times(self, start: Any, end: Any, step: int) -> tuple[int, int]:
        if isinstance(start, int):
            return start, int(end)
        assert self._cuda is not None
        return self._cuda.times(start, end, step)


class SpanBlock:
    """The context manager of `Recorder.span`."""

    __slots__ = ("bytes", "lane", "name", "recorder", "start", "unit")

    def __init__(self, recorder: Recorder, lane: str, name: str, unit: str, bytes: int) -> None:
        self.recorder, self.lane, self.name, self.unit, self.bytes = recorder, lane, name, unit, bytes

    def __enter__(self) -> "SpanBlock":
        self.start = self.recorder.mark(self.lane)
        return self

    def __exit__(self, *_: object) -> None:
        end = self.recorder.mark(self.lane)
        self.recorder.add(self.lane, self.name, self.start, end, unit=self.unit, bytes=self.bytes)


def _rows_from(rows: deque[_Row], first_step: int) -> list[_Row]:
    """The rows of steps from `first_step` on. Reads from the newest backwards, since most callers want a few steps.

    It works on copies, because other threads may add spans at the same time.
    """
    size = _CHUNK if first_step > 0 else len(rows) + _CHUNK
    while True:
        newest = list(islice(reversed(rows), size))
        # Threads add spans of the step before as well: half a chunk without a match ends the search.
        if len(newest) < size or all(row[3] < first_step for row in newest[size // 2 :]):
            return [row for row in reversed(newest) if row[3] >= first_step]
        size *= 4


_SHARED: dict[torch.device, Recorder] = {}


def process_recorder(device: torch.device, *, engine: bool = True, group: str = "") -> Recorder:
    """The recorder that all engines of this process on a device share, switched off until a recording starts.

    `group`: the label of the engine's process group, empty for all ranks.
    """
    if device not in _SHARED:
        _SHARED[device] = Recorder(device=device, enabled=False, start_clock=False)
    found = _SHARED[device]
    if engine:
        # Spans do not say which engine added them, so engines of several groups share no label.
        found.engine_group = group if not found.engines or found.engine_group == group else ""
    found.engines += engine
    return found
