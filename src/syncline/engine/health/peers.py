"""Lost and stuck peers get a name: heartbeats over the store, an alarm that reaches all ranks.

A survivor judges others by whether their counters advance while it looks, on its own clock; where a peer runs on the
same machine, /proc says at once and for certain. `doing` texts begin with "step N:", and hold "wait" while a rank
waits for others: that is how a rank that has come is told from one that has not.
"""

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from syncline._compat import PrefixStore, Store, TCPStore
from syncline.engine.health.heartbeat import (
    GONE,
    LIMIT,
    LOST,
    RUNNING,
    STOPPED,
    UNKNOWN,
    Beat,
    Sight,
    Verdict,
    Who,
    judge,
    named,
    process_state,
    this_process,
)
from syncline.errors import PeerError

_T = TypeVar("_T")
_PATIENCE = 1.0  # seconds for a last word to a store that may not answer


@dataclass(frozen=True)
class _Alarm:
    by: int
    kind: str
    ranks: tuple[int, ...]
    text: str


class Peers:
    """The life signs of all ranks of a group, as one of them sees and gives them.

    `names` are the group's global ranks (default: the group ranks themselves); messages and `PeerError.ranks` speak
    of those. `holder` is the global rank whose process serves a TCPStore (None: another process, as torchrun's
    agent). Ranks make their n-th `Peers` of one `prefix` together: records of an earlier one are never read.

    A rank that holds the store should leave last: once the store is gone, `raised` says so on the other ranks.
    """

    doing: str
    """What this rank does now, as others will read it; set it freely, it costs an attribute."""

    def __init__(
        self, store: Store, *, rank: int, world: int, timeout: float, period: float | None = None,
        names: Sequence[int] | None = None, holder: int | None = 0, prefix: str = "syncline/peers",
    ) -> None:  # fmt: skip
        self.doing = "starting"
        self._rank = rank
        self._names = tuple(names) if names is not None else tuple(range(world))
        assert len(self._names) == world
        assert 0 <= rank < world
        self._others = [other for other in range(world) if other != rank]
        self._timeout = timeout
        self._period = min(1.0, timeout / 4) if period is None else period
        self._here = this_process()
        self._who: dict[int, Who] = {}
        served = isinstance(_base(store), TCPStore)
        self._holder = holder if served and holder != self._names[rank] else None
        # A connection of our own: another user's blocking get would hold a shared one, and our heartbeats with it.
        own = PrefixStore(prefix, store.clone() if served else store)  # type: ignore[attr-defined]  # not in its stub
        self._store: Any = PrefixStore(str(own.add(f"born/{rank}", 1)), own)
        self._count = 0
        self._writing = threading.Lock()
        self._busy: float | None = None  # since when the heartbeat thread waits for the store
        self._unanswered: str | None = None  # why the store is taken for lost
        self._alarm: _Alarm | None = None
        self._failed = False
        self._end: str | None = None
        self._explaining = threading.Lock()
        self._verdict: Verdict | None = None
        self._stop = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"syncline-peers-{rank}", daemon=True)
        self._started = False

    def start(self) -> None:
        """Begin to give life signs, from a daemon thread: one set and one check of the store a period."""
        self._started = True
        atexit.register(self._at_exit)
        self._thread.start()

    def raised(self) -> str | None:
        """The alarm that some rank has raised, or that the store is lost; None while all is well. Costs nothing."""
        if self._alarm is not None:
            return f"rank {self._alarm.by} raised the alarm: {self._alarm.text}"
        busy, reason = self._busy, self._unanswered
        if reason is None and busy is not None and (waited := time.monotonic() - busy) > self._timeout:
            reason = f"no answer for {waited:.1f} s"
        if reason is None:
            return None
        likely = f": rank {self._holder} (it holds the store) is likely lost" if self._holder is not None else ""
        return f"the store does not answer ({reason}){likely}"

    def alarm(self, text: str, *, ranks: Sequence[int] = (), kind: str = LOST) -> None:
        """Tell all ranks that the exchange has failed; the first alarm stands. `ranks` are global."""
        mine = _Alarm(self._names[self._rank], kind, tuple(ranks), text)
        self._tell(lambda: self._raise(mine))

    def explain(self, what: str, cause: BaseException | None = None, grace: float = 1.0) -> PeerError:
        """The error to raise after `what` failed or came too late: it names the ranks that are the reason.

        Looks at the other ranks for at most about two periods and `grace` seconds, and raises the alarm for them.
        The first verdict stands: later calls, and calls of other threads, get the same one at once.
        """
        with self._explaining:
            if self._verdict is None:
                self._failed = True
                self._verdict = self._look(grace, cause)
                if self._alarm is None and not self._closed:
                    self.alarm(self._verdict.text, ranks=self._verdict.ranks, kind=self._verdict.kind)
        error = PeerError(f"{what}: {self._verdict.text}", ranks=self._verdict.ranks)
        error.__cause__ = cause
        return error

    def farewell(self, reason: BaseException | str | None = None) -> None:
        """Say that this rank leaves on purpose, and why; the first reason stands.

        A reason raises the alarm, so that nobody waits for this rank; one that follows from a peer's loss does not.
        """
        if not self._started or self._end is not None:
            return
        self._failed = self._failed or isinstance(reason, PeerError)
        self._end = _brief(reason)
        self._tell(self._beat)
        if self._end and not self._victim():
            me = named(self._names[self._rank], self._here)
            self.alarm(f"{me} ended with {self._end}, doing: {self.doing}", ranks=[self._names[self._rank]])

    def close(self) -> None:
        """Say farewell, end the thread and let go of the store. May be called more than once."""
        if self._closed:
            return
        self.farewell()
        self._closed = True
        atexit.unregister(self._at_exit)
        self._stop.set()
        if self._started:
            self._thread.join(_PATIENCE)
        if not self._thread.is_alive():  # it is alive only where the store's host hangs: nothing ends that call
            with self._explaining:
                self._store = None

    def _run(self) -> None:
        try:
            self._busy = time.monotonic()
            self._store.set(f"who/{self._rank}", self._here.encode())
            while not self._stop.is_set():
                self._busy = time.monotonic()
                self._beat()
                self._hear()
                self._meet()
                self._busy = None
                self._stop.wait(self._period)
        except RuntimeError as error:  # what stores raise; said by `raised`, since there is nobody here to catch it
            self._unanswered = _brief(error)

    def _beat(self) -> None:
        with self._writing:
            self._count += 1
            beat = Beat(self._count, self.doing[:LIMIT], time.time(), self._victim(), self._end)
            self._store.set(f"beat/{self._rank}", beat.encode())

    def _victim(self) -> bool:
        if self._alarm is None:
            return self._failed
        return self._names[self._rank] not in self._alarm.ranks

    def _hear(self) -> None:
        if self._alarm is None and self._store.check(["alarm"]):
            self._alarm = _decode(self._store.get("alarm"))

    def _raise(self, alarm: _Alarm) -> None:
        self._alarm = _decode(self._store.compare_set("alarm", "", json.dumps(asdict(alarm))))

    def _meet(self) -> None:
        """Learn once where everybody runs: too late when the store is gone."""
        missing = [rank for rank in self._others if rank not in self._who]
        if missing and self._store.check([f"who/{rank}" for rank in missing]):
            self._who |= {rank: Who.decode(data) for rank, data in self._fetch("who", missing).items()}

    def _fetch(self, kind: str, ranks: list[int]) -> dict[int, bytes]:
        """The records there are. Never a get before a check: one for a missing key blocks, and the connection too."""
        if ranks and not self._store.check([f"{kind}/{rank}" for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([f"{kind}/{rank}"])]
        return dict(
            zip(ranks, self._store.multi_get([f"{kind}/{rank}" for rank in ranks]) if ranks else [], strict=True)
        )

    def _read(self) -> dict[int, Beat]:
        self._hear()
        missing = [rank for rank in self._others if rank not in self._who]
        self._who |= {rank: Who.decode(data) for rank, data in self._fetch("who", missing).items()}
        return {rank: Beat.decode(data) for rank, data in self._fetch("beat", self._others).items()}

    def _look(self, grace: float, cause: BaseException | None) -> Verdict:
        if self._closed:
            return Verdict(UNKNOWN, (), f"this rank has closed its exchange{_because(cause)}")
        begin, first, doing = time.monotonic(), None, self.doing
        while True:
            if self._unanswered is not None:
                return self._without_store(self._unanswered)
            try:
                left = begin + 1.5 * self._period + grace - time.monotonic()
                beats = _within(max(left, self._period / 2), self._read)
            except (RuntimeError, TimeoutError) as error:
                self._unanswered = self._unanswered or _brief(error)
                return self._without_store(self._unanswered)
            if self._alarm is not None and self._alarm.kind != UNKNOWN:
                return self._heard(self._alarm)
            first = beats if first is None else first
            sights = {rank: self._sight(rank, first, beats) for rank in self._others}
            looked = time.monotonic() - begin
            verdict = judge(
                doing, sights, name=self._names.__getitem__, here=self._here, now=time.time(), looked=looked
            )
            decided = all(sight.decided for sight in sights.values())
            if (decided and (verdict.kind == LOST or looked >= 1.5 * self._period)) or left <= 0:
                break
            time.sleep(self._period / 4)
        if verdict.kind != UNKNOWN:
            return verdict
        return self._heard(self._alarm) if self._alarm else Verdict(UNKNOWN, (), verdict.text + _because(cause))

    def _sight(self, rank: int, first: dict[int, Beat], last: dict[int, Beat]) -> Sight:
        who = self._who.get(rank)
        return Sight(first.get(rank), last.get(rank), who, process_state(who, self._here) if who else None)

    def _heard(self, alarm: _Alarm) -> Verdict:
        by = "" if alarm.by == self._names[self._rank] else f" (found by rank {alarm.by})"
        return Verdict(alarm.kind, alarm.ranks, alarm.text + ("" if alarm.ranks == (alarm.by,) else by))

    def _without_store(self, reason: str) -> Verdict:
        """The verdict when the store does not answer: what this machine knows, and who holds the store."""
        until = time.monotonic() + 0.3  # a killed process closes its sockets a moment before it is seen as dead
        while True:
            states = {rank: process_state(who, self._here) for rank, who in self._who.items()}
            texts = {
                self._names[rank]: "is gone: it died or ended"
                if state == GONE
                else "is stopped (SIGSTOP or a debugger)"
                for rank, state in states.items()
                if state in (GONE, STOPPED)
            }
            if texts or time.monotonic() > until:
                break
            time.sleep(0.02)
        whos = {self._names[rank]: who for rank, who in self._who.items()}
        if self._holder is not None and self._holder not in texts:
            runs = {self._names[rank]: state for rank, state in states.items()}.get(self._holder) == RUNNING
            if not runs:
                texts[self._holder] = "is likely lost"
            elif not texts:
                texts[self._holder] = "runs, but its store does not answer"
        if not texts:
            return Verdict(UNKNOWN, (), f"the store does not answer, so that no rank can be named ({reason})")
        notes = {self._holder: "it holds the store"}
        sentences = [f"{named(name, whos.get(name), notes.get(name, ''))} {text}" for name, text in texts.items()]
        return Verdict(LOST, tuple(texts), f"{'; '.join(sentences)} (no answer of the store: {reason})")

    def _tell(self, say: Callable[[], None]) -> None:
        """Write to the store if it answers soon; else there is nobody to tell, which `raised` then says."""
        if self._unanswered is None and self._store is not None:
            try:
                _within(_PATIENCE, say)
            except (RuntimeError, TimeoutError) as error:
                self._unanswered = _brief(error)

    def _at_exit(self) -> None:
        # The interpreter is about to end: a daemon thread caught inside the store's C++ code would abort it.
        self.farewell(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
        self.close()


def _base(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _decode(data: bytes) -> _Alarm:
    fields = json.loads(data)
    return _Alarm(fields["by"], fields["kind"], tuple(fields["ranks"]), fields["text"])


def _brief(reason: BaseException | str | None) -> str:
    if isinstance(reason, BaseException):
        lines = str(reason).strip().splitlines()
        reason = f"{type(reason).__name__}: {lines[0]}" if lines else type(reason).__name__
    return (reason or "")[:LIMIT]


def _because(cause: BaseException | None) -> str:
    return f": {_brief(cause)}" if cause else ""


def _within(seconds: float, function: Callable[[], _T]) -> _T:
    """The function's value, or TimeoutError: run by a thread of its own, since a store's call cannot be ended."""
    done: list[_T | BaseException] = []

    def call() -> None:
        try:
            done.append(function())
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=call, name="syncline-peers-ask", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        raise TimeoutError(f"no answer for {seconds:.1f} s")
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]
