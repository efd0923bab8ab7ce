"""The executor for CPUs: worker threads that take launches in the plan's order, and updates as they fall due.

A worker stays with its launch through all its communications, so a wait holds nobody else up; there are more workers
than it takes to keep the wire busy. Collectives are issued in turn: round r of the n-th launch after round r of all
launches before it. Every rank does the same, so their collectives meet.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from syncline._compat import NoSubclasses
from syncline.engine.health.errors import PeerMonitor
from syncline.engine.launch.run import carry
from syncline.engine.launch.units import Launch, UnitRun
from syncline.trace import Recorder

_LOOK_S = 0.5
_PATIENCE_S = 3.0


class Promise:
    """Something a worker will have done. `wait` raises what went wrong."""

    marked: list[Tensor] | None = None

    def __init__(self, executor: "Threads") -> None:
        self._executor = executor
        self._event = threading.Event()
        self.error: BaseException | None = None

    def resolve(self, error: BaseException | None = None) -> None:
        """It is done, or it never will be."""
        self.error = error
        self._event.set()

    def wait(self) -> None:
        """Block until it is done."""
        if not self._event.is_set():
            recorder = self._executor.recorder
            begin = recorder.mark("wait")
            while not self._event.wait(_LOOK_S):
                self._executor.look()
            recorder.add_blocked(begin, recorder.mark("wait"))
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        """Whether it is done."""
        return self._event.is_set() and self.error is None


class Threads:
    """Worker threads over the launches of a backward pass, in order."""

    def __init__(
        self, recorder: Recorder, *, workers: int = 3, watched: PeerMonitor, cut: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        self.recorder, self.watched, self._cut = recorder, watched, cut
        self.failure: BaseException | None = None
        self.lanes = workers
        self._changed = threading.Condition()
        self._order: list[Launch] = []
        self._next = 0
        self._turns: list[int] = []
        self._tasks: list[tuple[int, int, Callable[[], None], Promise]] = []
        self._count = itertools.count()
        self._promises: set[Promise] = set()
        self._closing = self._blaming = False
        # Updates have a thread of their own: workers may all be on the wire for long.
        kinds = [*((self._next_launch, f"worker-{i}") for i in range(workers)), (self._next_task, "updates")]
        self._threads = [
            threading.Thread(target=self._work, args=(take,), name=f"syncline-{name}", daemon=True)
            for take, name in kinds
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, order: Sequence[Launch]) -> None:
        """A backward pass starts; its launches will go in this order."""
        with self._changed:
            self._raise()
            self._order, self._next = list(order), 0
            rounds = max((launch.rounds for launch in order), default=0)
            self._turns = [0] * rounds
            for number, launch in enumerate(self._order):
                launch.position = number
            for number in range(rounds):
                self._pass(number)

    def promise(self) -> Promise:
        """A promise that fails with the executor."""
        made = Promise(self)
        with self._changed:
            if self.failure is not None:
                made.resolve(self.failure)
            else:
                self._promises.add(made)
        return made

    def ready(self, unit: UnitRun) -> None:
        """A unit's gradients are there."""
        with self._changed:
            for launch in unit.launches:
                launch.ready = True
            self._changed.notify_all()

    def after(self, unit: UnitRun | None, work: Callable[[], None]) -> Promise:
        """Do `work` when the unit's gradients have arrived."""
        promise = self.promise()
        with self._changed:
            if unit is not None and unit.exchanged is not None and not unit.exchanged.done():
                unit.waiting.append((work, promise))
            else:
                self._due(unit, work, promise)
        return promise

    def _due(self, unit: UnitRun | None, work: Callable[[], None], promise: Promise) -> None:
        """Of what is due, first what the next forward needs first."""
        heapq.heappush(self._tasks, (unit.index if unit is not None else -1, next(self._count), work, promise))
        self._changed.notify_all()

    def fence(self) -> None:
        """Threads need none: the training thread is past what it did."""

    def fail(self, error: BaseException) -> None:
        """Nothing will be done any more: whoever waits is told why."""
        with self._changed:
            first = self.failure is None
            if self.failure is None:
                self.failure = error
            for promise in self._promises:
                promise.resolve(self.failure)
            self._promises.clear()
            self._changed.notify_all()
        if first:
            # A thread inside a collective when the interpreter ends would abort it.
            self._cut()

    def look(self) -> None:
        """Fail if another rank has found that something is lost."""
        error = None if self._blaming else self.watched.alarm()
        if error is not None:
            self.fail(error)

    def _blame(self, unit: str, error: BaseException) -> None:
        with self._changed:
            if self._blaming or self.failure is not None:
                return
            # From here on an alarm may be our own, and is no news; and nobody is told before the others have been.
            self._blaming = True
        self.fail(self.watched.error_for(unit, error))

    def close(self) -> None:
        """End the threads; after a failure, those that are stuck in a user's codec are left."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(timeout=None if self.failure is None else max(0.0, until - time.monotonic()))

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _work(self, take: Callable[[], Callable[[], None] | None]) -> None:
        with torch.no_grad(), NoSubclasses():
            while (job := self._take(take)) is not None:
                try:
                    job()
                except BaseException as error:
                    self._blame("", error)

    def _take(self, take: Callable[[], Callable[[], None] | None]) -> Callable[[], None] | None:
        with self._changed:
            while not self._closing and self.failure is None:
                job = take()
                if job is not None:
                    return job
                self._changed.wait()
        return None

    def _next_launch(self) -> Callable[[], None] | None:
        if self._next == len(self._order) or not self._order[self._next].ready:
            return None
        launch = self._order[self._next]
        self._next += 1
        return lambda: self._carry(launch)

    def _next_task(self) -> Callable[[], None] | None:
        if not self._tasks:
            return None
        _, _, work, promise = heapq.heappop(self._tasks)
        return lambda: self._do(work, promise)

    def _carry(self, launch: Launch) -> None:
        try:
            carry(launch, self.recorder, self._turn)
        except BaseException as error:
            self._blame(launch.label, error)
            return
        unit = launch.unit
        with self._changed:
            launch.done = True
            for number in range(len(self._turns)):
                self._pass(number)
            unit.open_parts -= 1
            if unit.open_parts:
                return
            unit.grads = []
            self._keep(unit.exchanged)
            due, unit.waiting = unit.waiting, []
            for work, promise in due:
                self._due(unit, work, promise)

    def _do(self, work: Callable[[], None], promise: Promise) -> None:
        work()
        with self._changed:
            self._keep(promise)

    def _keep(self, promise: Promise) -> None:
        self._promises.discard(promise)
        if self.failure is None:
            promise.resolve()

    @contextmanager
    def _turn(self, launch: Launch, number: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._turns[number] == launch.position)
            self._raise()
        yield
        with self._changed:
            self._turns[number] += 1
            self._pass(number)

    def _pass(self, number: int) -> None:
        """Step over launches that have no such round (in some codecs that is known only when they are done)."""
        at = self._turns[number]
        while at < len(self._order):
            launch = self._order[at]
            if launch.rounds > number if launch.always else not launch.done:
                break
            at += 1
        if at != self._turns[number]:
            self._turns[number] = at
        self._changed.notify_all()
