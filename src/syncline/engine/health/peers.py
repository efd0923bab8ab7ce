"""Peer failure detection: heartbeats through the store, a diagnosis of lost or stuck ranks, an alarm to all ranks.

A rank decides about its peers by whether their counters advance while it watches, on its own clock. For a peer on the
same machine, /proc gives the answer at once. `doing` texts begin with "step N:" and contain "wait" while a rank waits
for others; this separates ranks that have joined an exchange from ranks that have not.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from syncline._compat.groups import PrefixStore, Store, TCPStore
from syncline.engine.health.heartbeat import (
    GONE,
    LOST,
    MISUSE,
    RUNNING,
    STOPPED,
    TEXT_LIMIT,
    UNKNOWN,
    Diagnosis,
    Heartbeat,
    Observation,
    RankProcess,
    describe_rank,
    diagnose,
    process_state,
    this_process,
)
from syncline.errors import PeerError
from syncline.threads import in_thread

_T = TypeVar("_T")
_LAST_WRITE_S = 1.0
"""Patience for a last write to a store that may not answer."""
_SLOW_FILE_S = 30.0
"""Patience for a store in a file. Nobody serves it, so it cannot be lost; with many ranks on few cores it is slow."""


class Peers:
    """Sends this rank's heartbeats and watches those of the other ranks of a group.

    `global_ranks` are the group's global ranks (default: the group ranks themselves); messages and `PeerError.ranks`
    use them. `holder` is the global rank whose process serves a TCPStore (None: another process, such as torchrun's
    agent). All ranks create their n-th `Peers` of one `prefix` together, so records of an earlier one are never read.

    The rank that serves the store should leave last: once the store is gone, `alarm_text` reports that on the others.
    """

    doing: str
    """What this rank is doing now, for the messages of other ranks; setting it is only an assignment."""
    passes: int = 0
    """Backward passes that this rank has begun to average; on every rank, the n-th one is the same pass."""

    def __init__(
        self, store: Store, *, rank: int, world: int, timeout: float, period: float | None = None,
        global_ranks: Sequence[int] | None = None, holder: int | None = 0, prefix: str = "syncline/peers",
    ) -> None:  # fmt: skip
        self.doing = "starting"
        self._rank = rank
        self._global = tuple(global_ranks) if global_ranks is not None else tuple(range(world))
        assert len(self._global) == world
        assert 0 <= rank < world
        self._others = [other for other in range(world) if other != rank]
        self.timeout = timeout
        self._period = min(1.0, timeout / 4) if period is None else period
        self._own = this_process()
        self._processes: dict[int, RankProcess] = {}
        served = isinstance(_base_store(store), TCPStore)
        self._holder = holder if served and holder != self._global[rank] else None
        self._patience = 0.0 if served else min(timeout, _SLOW_FILE_S)
        # Our own connection: a blocking get of another user would block a shared one, and our heartbeats with it.
        own = PrefixStore(prefix, store.clone() if served else store)  # type: ignore[attr-defined]  # not in its stub
        self._store: Any = PrefixStore(str(own.add(f"born/{rank}", 1)), own)
        self._count = self._agreements = 0
        self._writing = threading.Lock()
        self._store_call_since: float | None = None  # when the heartbeat thread's current store call began
        self._store_error: str | None = None  # why the store is considered lost
        self._alarm: Diagnosis | None = None
        self._failed = False
        self._end: str | None = None
        self._looked_at = -1.0  # when `silent` last read the heartbeats
        self._last_beats: dict[int, tuple[int, float]] = {}  # by rank: the counter, and when it last advanced
        self._diagnosing = threading.Lock()
        self._diagnosis: Diagnosis | None = None
        self._stop = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"syncline-peers-{rank}", daemon=True)
        self._started = False

    def start(self) -> None:
        """Start the heartbeat thread (a daemon): one set and one check of the store per period."""
        self._started, self._pid = True, os.getpid()
        atexit.register(self._at_exit)
        self._thread.start()

    def alarm_text(self) -> str | None:
        """The alarm that some rank has raised, or that the store is lost; None while all is well. Costs nothing."""
        if self._alarm is not None:
            return f"rank {self._alarm.by} raised the alarm: {self._alarm.text}"
        since, reason = self._store_call_since, self._store_error
        if reason is None and since is not None and (waited := time.monotonic() - since) > self.timeout:
            reason = f"no answer for {waited:.1f} s"
        if reason is None:
            return None
        likely = f": rank {self._holder} (it holds the store) is likely lost" if self._holder is not None else ""
        return f"the store does not answer ({reason}){likely}"

    def silent(self) -> list[int]:
        """Ranks (global) that sent no new heartbeat for longer than the timeout, and did not leave.

        As calls of this method have seen it, so call it repeatedly while waiting; it reads the store once a period.
        """
        now = time.monotonic()
        if now - self._looked_at >= self._period and self._store_error is None:
            self._looked_at = now
            try:
                beats = _call_with_timeout(self.timeout, self._read_all)
            except (RuntimeError, TimeoutError) as error:
                self._store_error = _short(error)
                return []
            for rank in self._others:
                beat = beats.get(rank)
                count = beat.count if beat else 0
                if (beat and beat.end is not None) or count != self._last_beats.get(rank, (-1, now))[0]:
                    self._last_beats[rank] = (count, time.monotonic())
        return [self._global[rank] for rank, (_, at) in self._last_beats.items() if now - at > self.timeout]

    def raise_alarm(self, text: str, *, ranks: Sequence[int] = (), kind: str = LOST) -> None:
        """Tell all ranks that the exchange has failed; the first alarm counts. `ranks` are global."""
        mine = Diagnosis(kind, tuple(ranks), text, by=self._global[self._rank])
        self._try_write(lambda: self._write_alarm(mine))

    def wait_for_agreement(self, agreed: threading.Event) -> list[int]:
        """This rank changes something before its next pass: wait until all ranks have `agreed` to that.

        Returns as soon as ranks (global) are known that have begun that pass without a change, and names them.
        """
        self._agreements += 1
        while not agreed.wait(self._period / 4):
            if self._alarm is not None:
                raise RuntimeError("aborted: another rank has raised the alarm")
            if self._store_error is not None:
                continue  # the agreement has a timeout of its own
            try:
                beats = _call_with_timeout(self.timeout, self._read_all)
            except (RuntimeError, TimeoutError) as error:
                self._store_error = _short(error)
                continue
            if others := [r for r, b in beats.items() if b.passes > self.passes and b.agreements < self._agreements]:
                return [self._global[rank] for rank in others]
        return []

    def explain(self, what: str, cause: BaseException | None = None, grace: float = 1.0) -> PeerError:
        """The error to raise after `what` failed or timed out; it names the ranks that caused the failure."""
        found = self.diagnosis(cause, grace)
        error = PeerError(f"{what}: {found.text}", ranks=found.ranks)
        error.__cause__ = cause
        return error

    def diagnosis(self, cause: BaseException | None = None, grace: float = 1.0) -> Diagnosis:
        """Why an exchange has failed, with this error.

        Watches the other ranks for at most about two periods and `grace` seconds, and raises the alarm for them.
        The first diagnosis counts: later calls, and calls from other threads, get the same one at once.
        """
        with self._diagnosing:
            if self._diagnosis is None:
                self._failed = True
                self._diagnosis = self._diagnose(grace, cause)
                if self._alarm is None and not self._closed:
                    self.raise_alarm(self._diagnosis.text, ranks=self._diagnosis.ranks, kind=self._diagnosis.kind)
            return self._diagnosis

    def leave(self, reason: BaseException | str | None = None) -> None:
        """Announce that this rank leaves on purpose, and why; the first reason counts.

        A reason raises the alarm, so that nobody waits for this rank, unless it follows from the loss of a peer.
        """
        if not self._started or self._end is not None:
            return
        self._failed = self._failed or isinstance(reason, PeerError)
        self._end = _short(reason)
        self._try_write(self._beat)
        if self._end and not self._is_victim():
            me = self._global[self._rank]
            self.raise_alarm(f"{describe_rank(me, self._own)} ended with {self._end}, doing: {self.doing}", ranks=[me])

    def close(self, reason: BaseException | None = None) -> None:
        """Leave (`reason`: because of this error), end the thread and release the store. May be called twice."""
        if self._closed:
            return
        self.leave(reason)
        self._closed = True
        atexit.unregister(self._at_exit)
        self._stop.set()
        if self._started:
            self._thread.join(_LAST_WRITE_S)
        if not self._thread.is_alive():  # it is alive only if the store's host hangs, and nothing ends that call
            with self._diagnosing:
                self._store = None

    def _run(self) -> None:
        try:
            self._store_call_since = time.monotonic()
            self._store.set(f"who/{self._rank}", self._own.encode())
            while not self._stop.is_set():
                self._store_call_since = time.monotonic()
                self._beat()
                self._read_alarm()
                # Early: it is too late when the store is gone.
                self._read_processes(all_at_once=True)
                self._store_call_since = None
                self._stop.wait(self._period)
        except RuntimeError as error:  # raised by the store; `alarm_text` reports it, since nobody here can catch it
            self._store_error = _short(error)

    def _beat(self) -> None:
        with self._writing:
            self._count += 1
            passes, agreements = self.passes, self._agreements  # in this order: an agreement comes before its pass
            beat = Heartbeat(
                self._count,
                self.doing[:TEXT_LIMIT],
                time.time(),
                failed=self._is_victim(),
                passes=passes,
                agreements=agreements,
                end=self._end,
            )
            self._store.set(f"beat/{self._rank}", beat.encode())

    def _is_victim(self) -> bool:
        if self._alarm is None:
            return self._failed
        return self._global[self._rank] not in self._alarm.ranks

    def _read_alarm(self) -> None:
        if self._alarm is None and self._store.check(["alarm"]):
            self._alarm = Diagnosis.decode(self._store.get("alarm"))

    def _write_alarm(self, alarm: Diagnosis) -> None:
        self._alarm = Diagnosis.decode(self._store.compare_set("alarm", "", alarm.encode()))

    def _read_processes(self, *, all_at_once: bool = False) -> None:
        missing = [rank for rank in self._others if rank not in self._processes]
        found = self._fetch("who", missing, all_at_once=all_at_once)
        self._processes |= {rank: RankProcess.decode(data) for rank, data in found.items()}

    def _fetch(self, kind: str, ranks: list[int], *, all_at_once: bool = False) -> dict[int, bytes]:
        """The records that exist; with `all_at_once`, none unless all do.

        Checks before every get: a get of a missing key blocks, and so does the connection.
        """
        if ranks and not self._store.check([f"{kind}/{rank}" for rank in ranks]):
            ranks = [] if all_at_once else [rank for rank in ranks if self._store.check([f"{kind}/{rank}"])]
        if not ranks:
            return {}
        return dict(zip(ranks, self._store.multi_get([f"{kind}/{rank}" for rank in ranks]), strict=True))

    def _read_all(self) -> dict[int, Heartbeat]:
        self._read_alarm()
        self._read_processes()
        return {rank: Heartbeat.decode(data) for rank, data in self._fetch("beat", self._others).items()}

    def _diagnose(self, grace: float, cause: BaseException | None) -> Diagnosis:
        if self._closed:
            return Diagnosis(UNKNOWN, (), f"this rank has closed its engine{_because(cause)}")
        begin, first, doing = time.monotonic(), None, self.doing
        while True:
            if self._store_error is not None:
                return self._diagnose_without_store(self._store_error)
            try:
                left = begin + 1.5 * self._period + grace - time.monotonic()
                beats = _call_with_timeout(max(left, self._period / 2, self._patience), self._read_all)
            except (RuntimeError, TimeoutError) as error:
                self._store_error = self._store_error or _short(error)
                return self._diagnose_without_store(self._store_error)
            if self._alarm is not None and self._alarm.kind != UNKNOWN:
                return self._from_alarm(self._alarm)
            first = beats if first is None else first
            seen = {rank: self._observe(rank, first, beats) for rank in self._others}
            watched = time.monotonic() - begin
            found = diagnose(
                doing, seen, global_rank=self._global.__getitem__, own=self._own, now=time.time(), watched=watched
            )
            conclusive = all(observation.conclusive for observation in seen.values())
            if conclusive and (found.kind == LOST or watched >= 1.5 * self._period):
                break
            if left <= 0 and not (_is_overloaded(seen.values()) and watched < self.timeout):
                break
            time.sleep(self._period / 4)
        if found.kind != UNKNOWN:
            return found
        return self._from_alarm(self._alarm) if self._alarm else Diagnosis(UNKNOWN, (), found.text + _because(cause))

    def _observe(self, rank: int, first: dict[int, Heartbeat], last: dict[int, Heartbeat]) -> Observation:
        process = self._processes.get(rank)
        state = process_state(process, self._own) if process else None
        return Observation(first.get(rank), last.get(rank), process, state)

    def _from_alarm(self, alarm: Diagnosis) -> Diagnosis:
        if alarm.by == self._global[self._rank] or alarm.ranks == (alarm.by,) or alarm.kind == MISUSE:
            return alarm
        return replace(alarm, text=f"{alarm.text} (found by rank {alarm.by})")

    def _diagnose_without_store(self, reason: str) -> Diagnosis:
        """The diagnosis if the store does not answer: what this machine knows, and who holds the store."""
        until = time.monotonic() + 0.3  # a killed process closes its sockets a moment before /proc shows it as dead
        texts = {GONE: "is gone: it died or ended", STOPPED: "is stopped (SIGSTOP or a debugger)"}
        while True:
            states = {self._global[rank]: process_state(p, self._own) for rank, p in self._processes.items()}
            lost = {rank: texts[state] for rank, state in states.items() if state in texts}
            if lost or time.monotonic() > until:
                break
            time.sleep(0.02)
        if self._holder is not None and self._holder not in lost:
            if states.get(self._holder) != RUNNING:
                lost[self._holder] = "is likely lost"
            elif not lost:
                lost[self._holder] = "runs, but its store does not answer"
        if not lost:
            return Diagnosis(UNKNOWN, (), f"the store does not answer, so no rank can be named ({reason})")
        processes = {self._global[rank]: process for rank, process in self._processes.items()}
        sentences = [
            f"{describe_rank(rank, processes.get(rank), 'it holds the store' if rank == self._holder else '')} {text}"
            for rank, text in lost.items()
        ]
        return Diagnosis(LOST, tuple(lost), f"{'; '.join(sentences)} (no answer from the store: {reason})")

    def _try_write(self, write: Callable[[], None]) -> None:
        """Write to the store if it answers soon; if not, `alarm_text` reports that it is lost."""
        if self._store_error is None and self._store is not None:
            try:
                _call_with_timeout(max(_LAST_WRITE_S, self._patience), write)
            except (RuntimeError, TimeoutError) as error:
                self._store_error = _short(error)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: its parent still beats
        # The interpreter is about to end: a daemon thread inside the store's C++ code would abort it.
        self.close(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))


def _is_overloaded(seen: Collection[Observation]) -> bool:
    """Whether most of several peers on this machine run but are silent: it is too busy to tell which one is stuck."""
    silent = [one for one in seen if one.state == RUNNING and not one.conclusive]
    return len(seen) > 2 and 2 * len(silent) > len(seen)


def _base_store(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _short(reason: BaseException | str | None) -> str:
    if isinstance(reason, BaseException):
        lines = str(reason).strip().splitlines()
        reason = f"{type(reason).__name__}: {lines[0]}" if lines else type(reason).__name__
    return (reason or "")[:TEXT_LIMIT]


def _because(cause: BaseException | None) -> str:
    return f": {_short(cause)}" if cause else ""


def _call_with_timeout(seconds: float, function: Callable[[], _T]) -> _T:
    """The function's result, or TimeoutError. Runs in its own thread, since a call of a store cannot be cancelled."""
    try:
        return in_thread(function, name="syncline-peers-ask").result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer for {seconds:.1f} s") from None
