"""The recorder: a bounded ring of spans on one rank. Host spans read a clock, CUDA spans read events later."""

import time
from bisect import bisect_right
from collections import deque
from itertools import islice
from types import TracebackType
from typing import Any

import torch

from syncline._compat import raw_stream
from syncline.trace.record.cpu_time import MOST_STEPS, Usage
from syncline.trace.record.postprocess import cut_blocked
from syncline.trace.span import BLOCKED, STEP, Span

_Mark = Any  # an int (host nanoseconds), a torch.cuda.Event, or None where nothing is recorded
_Row = tuple[str, str, str, int, _Mark, _Mark, int]

HOST_LANES = frozenset({"data", "wait"})
"""Lanes that block the host; their spans use the host's clock even when the work of the others is on a GPU."""


_CHUNK = 1024
_APART_MS = 1000.0


class Recorder:
    """Keeps the last `capacity` spans of a rank; older ones are dropped and counted.

    On CUDA a span is a pair of events on the current stream: recording never synchronises, and the times are
    read in `spans()`, once the work has finished. `base=False` leaves out the one synchronisation, at the start, that
    ties the GPU's clock to the host's: spans can be filed and not be read.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        capacity: int = 200_000,
        device: torch.device | str = "cpu",
        enabled: bool = True,
        base: bool = True,
    ) -> None:
        self.rank = rank
        self.device = torch.device(device)
        self.step = 0
        self.enabled = enabled
        self.dropped = 0
        self.engines = 0
        """How many engines file their spans here."""
        self._cuda = self.device.type == "cuda"
        self._rows: deque[_Row] = deque(maxlen=capacity)
        self._steps: deque[_Row] = deque(maxlen=MOST_STEPS)
        self._ended = 0
        self._since = 0
        self.usage = Usage()
        """What each step took of the processor; marks of the lane `step` are its ends."""
        self._base: tuple[torch.cuda.Event, int] | None = None
        self._anchors: list[tuple[torch.cuda.Event, int]] = []
        self._anchored: list[int] = []
        self._chained = 0
        # A user need not have made the model's device the current one; looking a stream up is half of a mark's cost.
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._beside: dict[str, torch.cuda.Stream] = {}
        self._index = 0
        if self._cuda:
            self._index = torch.cuda.current_device() if self.device.index is None else self.device.index
        if self._cuda and base:
            self._base = self._base_event()

    def mark(self, lane: str = "forward") -> _Mark:
        """Now, on the clock that `lane` is timed by; None while nothing is recorded."""
        if not self.enabled:
            return None
        if lane == STEP:
            self.usage.look()
        return self._now(lane)

    def _now(self, lane: str) -> _Mark:
        if self._cuda and lane not in HOST_LANES:
            handle = raw_stream(self._index)
            stream = self._streams.get(handle)
            if stream is None:
                stream = self._streams[handle] = torch.cuda.current_stream(self._index)
            return None if torch.cuda.is_current_stream_capturing() else _event(stream)  # in a graph it has no time
        return time.perf_counter_ns()

    def mark_behind(self, future: "torch.futures.Future[Any]", device: torch.device, queue: str = "") -> _Mark:
        """When a GPU will have done what a future of tensors there stands for; None where no event can tell.

        A stream that is kept for this waits for it, one for each `queue` of things that end in their order. In a
        callback (`future.then`) it would be one of torch's 32 streams in turn, and timing events in so many streams
        hold compute up: they share the GPU's queues with it.
        """
        # On another device the wait would be the computing stream's.
        if not self._cuda or device.index != self._index or not future.done():
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = self._beside.get(queue)
        if stream is None:
            stream = self._beside[queue] = torch.cuda.Stream(self._index)
        with torch.cuda.stream(stream):
            future.wait()
            return _event(stream)

    def add(
        self,
        lane: str,
        name: str,
        start: _Mark,
        end: _Mark,
        *,
        unit: str = "",
        bytes: int = 0,
        step: int = -1,
    ) -> None:
        """File a span between two marks; `step` defaults to the current one. It needs both: one of them may be from a
        time at which nothing was recorded."""
        if not self.enabled or start is None or end is None:
            return
        row = (lane, name, unit, self.step if step < 0 else step, start, end, bytes)
        if lane == STEP:
            self._steps.append(row)  # apart from the others, which are many: the series of step times is whole
            self._ended += 1
            self.usage.keep(row[3])
            return
        if len(self._rows) == self._rows.maxlen:
            self.dropped += 1
        self._rows.append(row)

    def ended(self, lane: str, name: str, start: _Mark, *, unit: str, bytes: int, step: int) -> None:
        """File a span that ends now, which another thread may come to say after recording was switched off."""
        if start is None or (isinstance(start, int) and start < self._since):
            return
        end = self._now(lane)
        if end is not None:
            self.dropped += len(self._rows) == self._rows.maxlen
            self._rows.append((lane, name, unit, step, start, end, bytes))

    def span(self, lane: str, name: str = "", *, unit: str = "", bytes: int = 0) -> "Timed":
        """Context manager that files the span of its block."""
        return Timed(self, lane, name or lane, unit, bytes)

    def blocked(self, start: _Mark, end: _Mark) -> None:
        """The training thread (on CUDA: its stream) stood still: no forward, backward or data in that time."""
        self.add("wait", BLOCKED, start, end)

    def restart(self, *, rank: int = 0) -> None:
        """Forget everything and record from step 0 on. On CUDA this synchronises once."""
        self.rank, self.step, self.dropped = rank, 0, 0
        self._rows.clear()
        self._steps.clear()
        self._ended = 0
        self._since = time.perf_counter_ns()
        self.usage.close()
        self.usage = Usage()
        self._anchors, self._anchored, self._chained = [], [], 0
        if self._cuda:
            self._base = self._base_event()
        self.enabled = True

    def counts(self) -> tuple[int, int]:
        """Spans filed so far, dropped ones too, and steps."""
        return len(self._rows) + self.dropped, self._ended

    @property
    def whole_from(self) -> int:
        """The first step of which no span was dropped."""
        return self._rows[0][3] + 1 if self.dropped else 0

    def spans(self, first_step: int = 0) -> list[Span]:
        """The kept spans from a step on as records, steps last. On CUDA this waits for the events it reads."""
        self._chain()
        rows = [row for row in (*list(self._rows), *list(self._steps)) if row[3] >= first_step]
        return cut_blocked(
            [
                Span(self.rank, lane, name, unit, step, *self._times(start, end, step), size)
                for lane, name, unit, step, start, end, size in rows
            ]
        )

    def recent(self, first_step: int) -> list[Span]:
        """The spans from a step on, in no order, without those still under way; reads from the end backwards."""
        self._chain()
        spans: list[Span] = []
        for rows in (self._rows, self._steps):
            for lane, name, unit, step, start, end, _ in _from_the_end(rows, first_step):
                begin, finish = self._times(start, end, step)
                spans.append(Span(self.rank, lane, name, unit, step, begin, finish))
        return cut_blocked(spans)

    def lane_ns(self, first_step: int) -> dict[int, dict[str, int]]:
        """Nanoseconds by lane of every step from `first_step` on, for log lines."""
        totals: dict[int, dict[str, int]] = {}
        for span in self.recent(first_step):
            lanes = totals.setdefault(span.step, {})
            lanes[span.lane] = lanes.get(span.lane, 0) + span.end - span.start
        return totals

    def _base_event(self) -> tuple[torch.cuda.Event, int]:
        """An event and the host time at which it happened; the one synchronisation, before training starts."""
        stream = torch.cuda.current_stream(self._index)
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._index)
        event.record(stream)
        event.synchronize()
        return event, time.perf_counter_ns()

    def _chain(self) -> None:
        """Tie the steps' marks to the base, each to the one before: events tell distances in milliseconds as float32,
        which after an hour is a quarter of one."""
        fresh, self._chained = self._ended - self._chained, self._ended
        if self._base is None or not fresh:
            return
        event, host = self._anchors[-1] if self._anchors else self._base
        for row in reversed(list(islice(reversed(self._steps), fresh))):
            row[4].synchronize()
            apart = event.elapsed_time(row[4])
            if apart >= _APART_MS:
                event, host = row[4], host + round(apart * 1e6)
                self._anchors.append((event, host))
                self._anchored.append(row[3])

    def _times(self, start: _Mark, end: _Mark, step: int) -> tuple[int, int]:
        if isinstance(start, int):
            return start, int(end)
        assert self._base is not None
        end.synchronize()
        at = bisect_right(self._anchored, step) - 1
        event, host = self._base if at < 0 else self._anchors[at]
        begin = int(host + round(event.elapsed_time(start) * 1e6))
        # From its own start: the distance from elsewhere is too coarse for a short span.
        return begin, begin + max(0, round(start.elapsed_time(end) * 1e6))


class Timed:
    """The block of one span."""

    __slots__ = ("bytes", "lane", "name", "recorder", "start", "unit")

    def __init__(self, recorder: Recorder, lane: str, name: str, unit: str, bytes: int) -> None:
        self.recorder, self.lane, self.name, self.unit, self.bytes = recorder, lane, name, unit, bytes

    def __enter__(self) -> "Timed":
        self.start = self.recorder.mark(self.lane)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self.recorder.mark(self.lane)
        self.recorder.add(self.lane, self.name, self.start, end, unit=self.unit, bytes=self.bytes)


def _event(stream: torch.cuda.Stream) -> _Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _from_the_end(rows: deque[_Row], first_step: int) -> list[_Row]:
    """The rows from a step on, newest first. Workers file spans of the step before meanwhile: a copy is looked at."""
    size = _CHUNK
    while True:
        newest = list(islice(reversed(rows), size))
        if len(newest) < size or all(row[3] < first_step for row in newest[size // 2 :]):
            return [row for row in newest if row[3] >= first_step]
        size *= 4


_SHARED: dict[torch.device, Recorder] = {}


def process_recorder(device: torch.device, *, engine: bool = True) -> Recorder:
    """The recorder that all engines on a device share unless they are given one: switched off until a recording."""
    if device not in _SHARED:
        _SHARED[device] = Recorder(device=device, enabled=False, base=False)
    found = _SHARED[device]
    found.engines += engine
    return found
