"""The executor for CUDA: launches and updates are put on high-priority side streams, and the host never waits.

A launch stays on one side stream from encode to decode, so the memory it allocates is used by one stream only, and its
waits for communication block only the launches that share its stream. NCCL runs rounds in the plan's order. A touch
makes the current stream wait for an event. A thread looks for events that are late: a lost peer becomes an error on the
host, and the communicators are aborted so that a host which waits for the device is released.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._compat.groups import abort_group
from syncline._compat.tensors import NoSubclasses, raw_stream
from syncline.engine.health.peer_errors import PeerMonitor
from syncline.engine.launch.capture import Captures
from syncline.engine.launch.run import run_launch
from syncline.engine.launch.units import Launch, UnitRun
from syncline.trace import Recorder

_CHECK_S = 0.5
"""Seconds between two looks for late events."""
EARLY_PASSES = 6
"""Passes on one side stream, without captures: the plan changes then. Every stream costs the workspaces of libraries
for good, and every capture the time to make it."""

_MULTIPLYING = 2
"""Side streams for launches that multiply matrices: cuBLAS keeps 32 MiB for each. While one computes, the other one's
message is on the network."""


class EventTicket:
    """Work on a side stream; `wait` orders the current stream behind it."""

    marked: list[Tensor] | None = None

    def __init__(self, executor: "StreamExecutor") -> None:
        self._executor = executor
        self.event: Any = None
        self._seen: int | None = None
        """The stream that waited last: it does not need to wait again."""

    def resolve(self, event: Any) -> None:
        """The work has been issued; this event marks its end."""
        self.event = event

    def wait(self) -> None:
        """Make the current stream wait."""
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
        """Whether the device has done the work."""
        return self.event is not None and bool(self.event.query())


class StreamExecutor:
    """Side streams over the launches of a backward pass, issued in order.

    The training thread (autograd's thread during backward) issues all work. The watching thread reads `_issued` and
    may call `fail`.
    """

    def __init__(
        self, recorder: Recorder, device: torch.device, *, peers: PeerMonitor, captures: Captures | None,
        streams: int = 6, updates: int = 4,
    ) -> None:  # fmt: skip
        """`captures`: the captured launches, if launches may be captured."""
        self.recorder, self.device, self._peers, self._captures = recorder, device, peers, captures
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.failure: BaseException | None = None
        self.lanes = streams
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(streams)]
        self.first_stream = self._streams[0]
        self._updates = [torch.cuda.Stream(device, priority=-1) for _ in range(updates)]
        self._passes = 0
        self._order: list[Launch] = []
        self._next = 0
        self._exchanges: dict[UnitRun, EventTicket] = {}
        self._now: Any = None
        """An event: what the training stream had done when an optimizer began to step."""
        self._issued: deque[tuple[float, str, Any]] = deque()
        self._watched: dist.ProcessGroup | None = None
        """The group of other communication that is to be aborted after a failure."""
        self._closing = threading.Event()
        self._timeout = peers.timeout
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._closing), name="syncline-late", daemon=True
        )
        self._thread.start()

    def begin(self, order: Sequence[Launch]) -> None:
        """Start a backward pass; its launches are issued in this order."""
        self._raise_failure()
        if self._captures is not None:
            self._captures.begin(order)
        self._passes += 1
        self._order, self._next = list(order), 0
        self._exchanges = {launch.unit: EventTicket(self) for launch in self._order}
        for number, launch in enumerate(self._order):
            launch.position = number

    def exchanged(self, unit: UnitRun) -> EventTicket | None:
        """The ticket of the unit's averaged gradients in the current pass."""
        return self._exchanges.get(unit)

    def ready(self, unit: UnitRun) -> None:
        """A unit's gradients are complete, on the current stream; issue what is next in the order."""
        event = self._moment()
        for launch in unit.launches:
            launch.ready, launch.event = True, event
        while self._next < len(self._order) and self._order[self._next].ready:
            launch = self._order[self._next]
            self._next += 1
            self._issue(launch)

    def append(self, unit: UnitRun) -> None:
        """Add a complete unit to the running pass, behind those before it (DDP's buckets come one by one)."""
        self._raise_failure()
        self._exchanges[unit] = EventTicket(self)
        for launch in unit.launches:
            launch.position = len(self._order)
            self._order.append(launch)
        self.ready(unit)

    def end_backward(self) -> None:
        """Nothing to do: launches were issued as their units got ready."""

    def begin_updates(self, units: Sequence[UnitRun]) -> None:
        """Updates of all units come after what the current stream has done so far."""
        self._now = self._moment()

    def after(self, unit: UnitRun | None, work: Callable[[], None]) -> EventTicket:
        """Issue `work` behind the unit's exchange and behind what the current stream has done so far."""
        self._raise_failure()
        now = self._now if unit is not None and self._now is not None else self._moment()
        # Not the launch's stream: other launches have been issued there since, and may take long.
        stream = self._updates[unit.index % len(self._updates) if unit is not None else -1]
        stream.wait_event(now)
        exchanged = None if unit is None else self._exchanges.get(unit)
        if exchanged is not None and exchanged.event is not None:
            stream.wait_event(exchanged.event)
        ticket = EventTicket(self)
        with torch.cuda.stream(stream), torch.no_grad(), NoSubclasses():
            work()
            ticket.resolve(self._end(stream, "update"))
        return ticket

    def end_updates(self) -> None:
        """Nothing to do."""

    def _moment(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def watch(self, label: str, group: dist.ProcessGroup) -> None:
        """Others have put communication of this group on the current stream: it is an error if that does not end."""
        self._watched = group
        self._end(torch.cuda.current_stream(self.device), label)

    def fail(self, error: BaseException) -> None:
        """Do nothing any more, and abort what is on the network. From any thread; the first error counts."""
        if self.failure is None:
            self.failure = error
        groups = {id(link.group): link.group for launch in self._order for link in launch.links}
        if self._watched is not None:
            groups[id(self._watched)] = self._watched
        for group in groups.values():
            abort_group(group, self.device)

    def close(self) -> None:
        """End the watching thread."""
        self._closing.set()
        self._thread.join(timeout=5)

    def _issue(self, launch: Launch) -> None:
        stream = self._streams[self._number(launch)]
        stream.wait_event(launch.event)
        unit = launch.unit
        try:
            with torch.cuda.stream(stream), torch.no_grad(), NoSubclasses():
                self._run(launch)
                launch.event = self._end(stream, launch.label)
        except BaseException as error:
            self.fail(self._peers.error_for(launch.label, error))
            self._raise_failure()
        unit.open_launches -= 1
        if unit.open_launches == 0:
            for other in unit.launches:
                if other is not launch:
                    stream.wait_event(other.event)
            self._exchanges[unit].resolve(launch.event if len(unit.launches) == 1 else self._end(stream, launch.label))

    def _run(self, launch: Launch) -> None:
        captures = self._captures
        early = self._passes <= EARLY_PASSES
        made = captures.of(launch, self._number(launch), allowed=not early) if captures is not None else None
        if made is not None:
            made.run(launch, self.recorder)
        else:
            run_launch(launch, self.recorder, None)

    def _number(self, launch: Launch) -> int:
        """Which side stream a launch is put on."""
        if self._passes <= EARLY_PASSES:
            return 0
        multiplies = launch.unit.codec.definition.carries == "factors"
        return launch.position % (_MULTIPLYING if multiplies else len(self._streams))

    def _end(self, stream: torch.cuda.Stream, label: str) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        self._issued.append((time.monotonic(), label, event))
        return event

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def find_late(self) -> None:
        """Fail if issued work is late. It ends nearly in order, so only the oldest is checked. In the thread for it."""
        while self._issued and self._issued[0][2].query():
            self._issued.popleft()
        if self.failure is not None:
            return
        found = self._peers.alarm()
        if found is None and self._issued and time.monotonic() - self._issued[0][0] > self._timeout:
            cause = dist.DistError(f"timed out after {self._timeout:g} s")
            self.fail(self._peers.error_for(self._issued[0][1], cause))
        elif found is not None:
            self.fail(found)


def _watch(known: "weakref.ref[StreamExecutor]", closing: threading.Event) -> None:
    """The loop of the thread. It does not hold the executor while it waits: a dropped engine can be collected."""
    while not closing.wait(_CHECK_S):
        executor = known()
        if executor is None:
            return
        executor.find_late()
        del executor
