"""The executor for CUDA: everything is put on high-priority side streams at once, and the host never waits.

A launch keeps one side stream from encode to decode, so memory that it allocates is used by one stream alone and waits
for its communication hold nobody up but the launches that share its stream; NCCL runs rounds in the plan's order.
Touches make the current stream wait for an event. A thread looks at events that are late: a peer that is lost becomes
an error on the host, and the communicators are aborted so that a host which waits for the device gets it back.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._compat import NoSubclasses, raw_stream
from syncline.engine.health.errors import PeerMonitor
from syncline.engine.launch.run import carry
from syncline.engine.launch.units import Launch, UnitRun
from syncline.trace import Recorder

_LOOK_S = 0.5


class EventPromise:
    """Work on a side stream; `wait` orders the current stream behind it."""

    marked: list[Tensor] | None = None

    def __init__(self, executor: "Streams") -> None:
        self._executor = executor
        self.event: Any = None
        self._seen: int | None = None
        """The stream that waited last: it need not wait again."""

    def resolve(self, event: Any) -> None:
        """The work has been issued; this event ends it."""
        self.event = event

    def wait(self) -> None:
        """Let the current stream wait."""
        executor = self._executor
        if executor.failure is not None:
            raise executor.failure
        assert self.event is not None, "a unit was waited for before it was issued"
        handle = raw_stream(executor.index)
        if self._seen == handle or self.event.query():
            return
        self._seen = handle
        stream = torch.cuda.current_stream(executor.device)
        recorder = executor.recorder
        begin = recorder.mark("forward") if recorder.enabled else None
        stream.wait_event(self.event)
        if recorder.enabled:
            recorder.add_blocked(begin, recorder.mark("forward"))

    def done(self) -> bool:
        """Whether the device has done it."""
        return self.event is not None and bool(self.event.query())


class Streams:
    """Side streams over the launches of a backward pass, issued in order."""

    def __init__(
        self, recorder: Recorder, device: torch.device, *, watched: PeerMonitor, streams: int = 6, updates: int = 4
    ) -> None:
        self.recorder, self.device, self.watched = recorder, device, watched
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.failure: BaseException | None = None
        self.lanes = streams
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(streams)]
        self._updates = [torch.cuda.Stream(device, priority=-1) for _ in range(updates)]
        self._order: list[Launch] = []
        self._next = 0
        self._now: Any = None
        self._issued: deque[tuple[float, str, Any]] = deque()
        self._closing = threading.Event()
        self._timeout = watched.timeout
        self._thread = threading.Thread(target=self._look, name="syncline-late", daemon=True)
        self._thread.start()

    def begin(self, order: Sequence[Launch]) -> None:
        """A backward pass starts; its launches will go in this order."""
        self._raise()
        self._order, self._next = list(order), 0
        for number, launch in enumerate(self._order):
            launch.position = number

    def promise(self) -> EventPromise:
        """A promise of work that is still to be issued."""
        return EventPromise(self)

    def ready(self, unit: UnitRun) -> None:
        """A unit's gradients are there, on the current stream; issue what is next in the order."""
        event = self._moment()
        for launch in unit.launches:
            launch.ready, launch.event = True, event
        while self._next < len(self._order) and self._order[self._next].ready:
            launch = self._order[self._next]
            self._next += 1
            self._carry(launch)

    def after(self, unit: UnitRun | None, work: Callable[[], None]) -> EventPromise:
        """Issue `work` behind the unit's exchange and behind what the current stream has done so far."""
        self._raise()
        now = self._now if unit is not None and self._now is not None else self._moment()
        # Not the launch's stream: launches that were issued later are before us there, and may take long.
        stream = self._updates[unit.index % len(self._updates) if unit is not None else -1]
        stream.wait_event(now)
        if unit is not None and unit.exchanged.event is not None:
            stream.wait_event(unit.exchanged.event)
        promise = EventPromise(self)
        with torch.cuda.stream(stream), torch.no_grad(), NoSubclasses():
            work()
            promise.resolve(self._end(stream, "update"))
        return promise

    def fence(self) -> None:
        """What follows (updates of many units) comes after what the current stream has done so far."""
        self._now = self._moment()

    def _moment(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def fail(self, error: BaseException) -> None:
        """Nothing will be done any more."""
        if self.failure is None:
            self.failure = error
        for group in {id(link.group): link.group for launch in self._order for link in launch.links}.values():
            with suppress(Exception):
                group._get_backend(self.device).abort()  # type: ignore[union-attr]

    def close(self) -> None:
        """End the watching thread."""
        self._closing.set()
        self._thread.join(timeout=5)

    def _carry(self, launch: Launch) -> None:
        stream = self._stream(launch.position)
        stream.wait_event(launch.event)
        unit = launch.unit
        try:
            with torch.cuda.stream(stream), torch.no_grad(), NoSubclasses():
                carry(launch, self.recorder, None)
                launch.event = self._end(stream, launch.label)
        except BaseException as error:
            self.fail(self.watched.error_for(launch.label, error))
            self._raise()
        unit.open_parts -= 1
        if unit.open_parts == 0:
            last = self._stream(launch.position)
            for other in unit.launches:
                if other is not launch:
                    last.wait_event(other.event)
            unit.exchanged.resolve(launch.event if len(unit.launches) == 1 else self._end(last, launch.label))

    def _stream(self, position: int) -> torch.cuda.Stream:
        return self._streams[position % len(self._streams)]

    def _end(self, stream: torch.cuda.Stream, label: str) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        self._issued.append((time.monotonic(), label, event))
        return event

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _look(self) -> None:
        """Find what is late. Issued work ends in order, near enough: only the oldest is looked at."""
        while not self._closing.wait(_LOOK_S):
            while self._issued and self._issued[0][2].query():
                self._issued.popleft()
            if self.failure is not None:
                continue
            found = self.watched.alarm()
            if found is None and self._issued and time.monotonic() - self._issued[0][0] > self._timeout:
                cause = dist.DistError(f"timed out after {self._timeout:g} s")
                explained = self.watched.error_for(self._issued[0][1], cause)
                self.fail(explained)
            elif found is not None:
                self.fail(found)
