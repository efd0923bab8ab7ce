"""The executor for CPUs: worker threads run launches in the plan's order, one more thread runs updates.

A worker stays with its launch through all its rounds of communication, so a wait blocks no other launch; there are more
workers than are needed to keep the network busy. Collectives are issued in turn: round r of the n-th launch after round
r of all launches before it. Every rank does the same, so collectives match across ranks.
"""

import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._compat.tensors import NoSubclasses
from syncline.engine.health.peer_errors import PeerMonitor
from syncline.engine.launch.reused_memory import ReusedMemory
from syncline.engine.launch.run import run_launch
from syncline.engine.launch.units import Launch, UnitRun
from syncline.trace import Recorder

_CHECK_S = 0.5
"""Seconds between two looks at the peers while a thread waits."""
_JOIN_S = 3.0
"""After a failure, seconds to wait for threads that may be stuck in a user's codec."""

Work = Callable[[], None]


class ThreadTicket:
    """Work that a thread will do. `wait` raises the error if it fails."""

    marked: list[Tensor] | None = None

    def __init__(self, executor: "ThreadExecutor") -> None:
        self._executor = executor
        self._event = threading.Event()
        self._error: BaseException | None = None

    def resolve(self, error: BaseException | None = None) -> None:
        """The work is done, or will never be done because of this error. From any thread."""
        self._error = error
        self._event.set()

    def wait(self) -> None:
        """Block until the work is done. From any thread."""
        if not self._event.is_set():
            recorder = self._executor.recorder
            begin = recorder.mark("wait")
            while not self._event.wait(_CHECK_S):
                self._executor.check_peers()
            recorder.add_blocked(begin, recorder.mark("wait"))
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether the work is done."""
        return self._event.is_set() and self._error is None


class ThreadExecutor:
    """Worker threads over the launches of a backward pass, in order.

    All state is guarded by the lock `_lock`: public methods take it, private ones are called with it held unless they
    say otherwise. Threads wait for conditions of this lock, one per kind of wait: a thread that wakes up for nothing
    takes the interpreter from the training thread.
    """

    def __init__(
        self, recorder: Recorder, *, workers: int = 3, peers: PeerMonitor, cut: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        self.recorder, self._peers, self._cut = recorder, peers, cut
        self.failure: BaseException | None = None
        self.lanes = workers
        self._lock = threading.RLock()
        self._launchable, self._updatable, self._turned = (threading.Condition(self._lock) for _ in range(3))
        """A launch may start; an update may start; a collective was issued, so the next one may be."""
        self._memory = ReusedMemory()
        self._order: list[Launch] = []
        self._next = 0
        """Place in `_order` of the launch that starts next."""
        self._turns: list[int] = []
        """By round: place in `_order` of the launch whose collective is issued next."""
        self._exchanges: dict[UnitRun, ThreadTicket] = {}
        self._after: dict[UnitRun, list[tuple[Work, ThreadTicket]]] = {}
        """Updates that wait for their unit's exchange."""
        self._due: list[tuple[int, int, Work, ThreadTicket]] = []
        """A heap of updates that can run now."""
        self._count = itertools.count()
        self._tickets: set[ThreadTicket] = set()
        """Tickets that are not resolved."""
        self._closing = self._explaining = False
        # Updates have their own thread: all workers may be busy with the network for long.
        known, launchable = weakref.ref(self), self._launchable
        kinds = [((known, launchable, ThreadExecutor.next_launch), f"worker-{i}") for i in range(workers)]
        kinds.append(((known, self._updatable, ThreadExecutor.next_update), "updates"))
        self._threads = [
            threading.Thread(target=_run_jobs, args=job, name=f"syncline-{name}", daemon=True) for job, name in kinds
        ]
        weakref.finalize(self, _wake, (self._launchable, self._updatable, self._turned)).atexit = False
        for thread in self._threads:
            thread.start()

    def begin(self, order: Sequence[Launch]) -> None:
        """Start a backward pass; its launches run in this order."""
        with self._lock:
            self._raise_failure()
            if order and [*order] != self._order:
                self._memory.clear()  # another plan
            self._order, self._next = list(order), 0
            self._exchanges, self._after = {}, {}
            rounds = max((launch.rounds for launch in order), default=0)
            self._turns = [0] * rounds
            for number, launch in enumerate(self._order):
                launch.position = number
                if launch.unit not in self._exchanges:
                    self._exchanges[launch.unit] = self._ticket()
            for number in range(rounds):
                self._skip_absent(number)

    def exchanged(self, unit: UnitRun) -> ThreadTicket | None:
        """The ticket of the unit's averaged gradients in the current pass."""
        return self._exchanges.get(unit)

    def ready(self, unit: UnitRun) -> None:
        """A unit's gradients are complete."""
        with self._lock:
            for launch in unit.launches:
                launch.ready = True
            self._wake_worker()

    def append(self, unit: UnitRun) -> None:
        """Add a complete unit to the running pass, behind those before it (DDP's buckets come one by one)."""
        with self._lock:
            self._raise_failure()
            self._exchanges[unit] = self._ticket()
            for launch in unit.launches:
                launch.position, launch.ready = len(self._order), True
                self._order.append(launch)
                self._turns += [0] * (launch.rounds - len(self._turns))
            for number in range(len(self._turns)):
                self._skip_absent(number)
            self._wake_worker()

    def end_backward(self) -> None:
        """Nothing to do: workers start launches as their units get ready."""

    def begin_updates(self, units: Sequence[UnitRun]) -> None:
        """Nothing to do: the training thread has finished what it did before."""

    def after(self, unit: UnitRun | None, work: Work) -> ThreadTicket:
        """Do `work` when the unit's gradients have arrived."""
        with self._lock:
            ticket = self._ticket()
            exchanged = None if unit is None else self._exchanges.get(unit)
            if unit is not None and exchanged is not None and not exchanged.done():
                self._after.setdefault(unit, []).append((work, ticket))
            else:
                self._push(unit, work, ticket)
        return ticket

    def end_updates(self) -> None:
        """Nothing to do."""

    def watch(self, label: str, group: dist.ProcessGroup) -> None:
        """Nothing to do: on the CPU, communication has ended when the training thread has waited for it."""

    def fail(self, error: BaseException) -> None:
        """Do nothing any more: whoever waits gets the error. From any thread; the first error counts."""
        with self._lock:
            first = self.failure is None
            if self.failure is None:
                self.failure = error
            for ticket in self._tickets:
                ticket.resolve(self.failure)
            self._tickets.clear()
            self._wake_all()
        if first:
            # A thread inside a collective when the interpreter ends would abort the process.
            self._cut()

    def check_peers(self) -> None:
        """Fail if another rank has reported a lost peer. From any thread that waits."""
        error = None if self._explaining else self._peers.alarm()
        if error is not None:
            self.fail(error)

    def close(self) -> None:
        """End the threads; after a failure, threads that are stuck in a user's codec are abandoned."""
        with self._lock:
            self._closing = True
            self._wake_all()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(timeout=None if self.failure is None else max(0.0, until - time.monotonic()))

    def _ticket(self) -> ThreadTicket:
        """A ticket that fails with the executor."""
        ticket = ThreadTicket(self)
        if self.failure is not None:
            ticket.resolve(self.failure)
        else:
            self._tickets.add(ticket)
        return ticket

    def _push(self, unit: UnitRun | None, work: Work, ticket: ThreadTicket) -> None:
        """An update can run now. Of several, the one that the next forward needs first goes first."""
        heapq.heappush(self._due, (unit.index if unit is not None else -1, next(self._count), work, ticket))
        self._updatable.notify()

    def _wake_worker(self) -> None:
        """Wake one worker if a launch may start; it wakes the next one if there are more."""
        if self._next < len(self._order) and self._order[self._next].ready:
            self._launchable.notify()

    def _wake_all(self) -> None:
        for condition in (self._launchable, self._updatable, self._turned):
            condition.notify_all()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def explain(self, unit: str, error: BaseException) -> None:
        """Fail with an error that names the peer to blame, if one is. From a worker thread, without the lock."""
        with self._lock:
            if self._explaining or self.failure is not None:
                return
            # From here on an alarm may be our own. And peers are told before anybody here gets the error.
            self._explaining = True
        self.fail(self._peers.error_for(unit, error))

    @property
    def is_open(self) -> bool:
        """Whether jobs may run."""
        return not self._closing and self.failure is None

    def next_launch(self) -> Work | None:
        """The next launch, if it can run. With the lock held."""
        if self._next == len(self._order) or not self._order[self._next].ready:
            return None
        launch = self._order[self._next]
        self._next += 1
        self._wake_worker()
        return lambda: self._run_launch(launch)

    def next_update(self) -> Work | None:
        """The next update, if one can run. With the lock held."""
        if not self._due:
            return None
        _, _, work, ticket = heapq.heappop(self._due)
        return lambda: self._run_update(work, ticket)

    def _run_launch(self, launch: Launch) -> None:
        """In a worker thread, without the lock."""
        try:
            run_launch(launch, self.recorder, self._turn, self._memory)
        except BaseException as error:
            self.explain(launch.label, error)
            return
        unit = launch.unit
        with self._lock:
            launch.done = True
            for number in range(len(self._turns)):
                self._skip_absent(number)
            unit.open_launches -= 1
            if unit.open_launches:
                return
            unit.grads = []
            self._resolve(self._exchanges[unit])
            for work, ticket in self._after.pop(unit, ()):
                self._push(unit, work, ticket)

    def _run_update(self, work: Work, ticket: ThreadTicket) -> None:
        """In the thread of updates, without the lock."""
        work()
        with self._lock:
            self._resolve(ticket)

    def _resolve(self, ticket: ThreadTicket) -> None:
        self._tickets.discard(ticket)
        if self.failure is None:
            ticket.resolve()

    @contextmanager
    def _turn(self, launch: Launch, number: int) -> Iterator[None]:
        """Wait until all launches before this one have issued this round. In a worker thread, without the lock."""
        with self._lock:
            self._turned.wait_for(lambda: self.failure is not None or self._turns[number] == launch.position)
            self._raise_failure()
        yield
        with self._lock:
            self._turns[number] += 1
            self._skip_absent(number)

    def _skip_absent(self, number: int) -> None:
        """Skip launches that have no such round (for some codecs that is known only when they are done)."""
        at = self._turns[number]
        while at < len(self._order):
            launch = self._order[at]
            if launch.rounds > number if launch.fixed_rounds else not launch.done:
                break
            at += 1
        self._turns[number] = at
        self._turned.notify_all()


Take = Callable[[ThreadExecutor], Work | None]


def _run_jobs(known: "weakref.ref[ThreadExecutor]", changed: threading.Condition, take: Take) -> None:
    """The loop of a thread. It holds the executor only while it works, so that a dropped engine can be collected."""
    with torch.no_grad(), NoSubclasses():
        while (job := _wait_for_job(known, changed, take)) is not None:
            try:
                job()
            except BaseException as error:
                executor = known()
                if executor is not None:
                    executor.explain("", error)
                del executor
            del job


def _wait_for_job(known: "weakref.ref[ThreadExecutor]", changed: threading.Condition, take: Take) -> Work | None:
    with changed:
        while (executor := known()) is not None and executor.is_open:
            job = take(executor)
            if job is not None:
                return job
            del executor
            changed.wait()
    return None


def _wake(conditions: Sequence[threading.Condition]) -> None:
    for condition in conditions:
        with condition:
            condition.notify_all()
