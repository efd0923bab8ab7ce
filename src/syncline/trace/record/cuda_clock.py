"""Moments on a GPU as CUDA events, and their conversion into nanoseconds of the host's clock."""

import time
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import torch

from syncline._compat.tensors import raw_stream

_ANCHOR_DISTANCE_MS = 1000.0


class CudaClock:
    """The clock of one GPU. Marking a moment records an event and never synchronises; events are read later.

    Events measure distances in milliseconds as float32: after an hour that is accurate to a quarter of a millisecond.
    So times are not measured from the start of the recording but from `anchors`, about a second apart.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.base: tuple[torch.cuda.Event, int] | None = None
        """An event and the host time at which it happened. Without it events can be recorded but not read."""
        self._anchors: list[tuple[torch.cuda.Event, int]] = []
        self._anchor_steps: list[int] = []
        # The model's device need not be the current one. Looking up a stream is half of the cost of a mark.
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.completion_streams: dict[str, torch.cuda.Stream] = {}
        """By queue: the stream on which `mark_completion` waits."""

    def start(self) -> None:
        """Tie the GPU's clock to the host's, with the only synchronisation, and forget all anchors."""
        self._anchors, self._anchor_steps = [], []
        stream = torch.cuda.current_stream(self._index)
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._index)
        event.record(stream)
        event.synchronize()
        self.base = event, time.perf_counter_ns()

    def mark(self) -> torch.cuda.Event | None:
        """An event on the current stream; None while a CUDA graph is captured, in which events have no time."""
        handle = raw_stream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._index)
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def mark_completion(
        self, future: "torch.futures.Future[Any]", device: torch.device, queue: str
    ) -> torch.cuda.Event | None:
        """An event at the moment the GPU has finished what `future` stands for; None where no event can show it.

        A stream that is kept for this purpose waits for it, one for each `queue` of operations that end in order. A
        callback (`future.then`) would run on one of torch's 32 streams in turn. Timing events on that many streams
        delay compute, because they share the GPU's queues with it.
        """
        # On another device the computing stream would have to wait.
        if device.index != self._index or not future.done() or torch.cuda.is_current_stream_capturing():
            return None
        stream = self.completion_streams.get(queue)
        if stream is None:
            stream = self.completion_streams[queue] = torch.cuda.Stream(self._index)
        with torch.cuda.stream(stream):
            future.wait()
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            return event

    def add_anchors(self, starts: Iterable[tuple[int, torch.cuda.Event]]) -> None:
        """Measure the starts of further steps, `(step, event)` in order, each from the anchor before it."""
        if self.base is None:
            return
        event, host_ns = self._anchors[-1] if self._anchors else self.base
        for step, start in starts:
            start.synchronize()
            distance_ms = event.elapsed_time(start)
            if distance_ms >= _ANCHOR_DISTANCE_MS:
                event, host_ns = start, host_ns + round(distance_ms * 1e6)
                self._anchors.append((event, host_ns))
                self._anchor_steps.append(step)

    def times(self, start: torch.cuda.Event, end: torch.cuda.Event, step: int) -> tuple[int, int]:
        """Start and end of a span of a step in host nanoseconds. Waits for the events."""
        assert self.base is not None
        end.synchronize()
        at = bisect_right(self._anchor_steps, step) - 1
        event, host_ns = self.base if at < 0 else self._anchors[at]
        begin = int(host_ns + round(event.elapsed_time(start) * 1e6))
        # The end is measured from the start: a distance from the anchor is too coarse for a short span.
        return begin, begin + max(0, round(start.elapsed_time(end) * 1e6))
