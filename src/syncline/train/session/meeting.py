"""Meeting points of ranks that a launcher has started, over its store. A lost rank is a `PeerError`, not a hang.

Heartbeats separate a rank that is busy, maybe for hours, from one that is lost: its host may vanish without closing a
connection, and then neither the store nor the kernel reports anything.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from syncline._compat.groups import PrefixStore, Store
from syncline.engine.health.peers import Peers
from syncline.errors import PeerError
from syncline.threads import in_thread

_POLL_S = 0.05
_SAVING_S = 10.0
"""Time for rank 0 to write results and report."""
_T = TypeVar("_T")


class Meeting:
    """This rank's view of the others between runs. No call waits for a lost rank longer than about `timeout_s`."""

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        self._peers = Peers(
            store,
            rank=rank,
            world=world_size,
            timeout=timeout_s,
            # Under torchrun the agent serves the store, not rank 0.
            holder=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
            prefix=f"syncline/session/attempt{attempt}",
        )
        self._peers.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._peers.close(error)

    def say(self, doing: str) -> None:
        """What this rank does now, for the messages of the others."""
        self._peers.doing = doing

    def ask(self, call: Callable[[], _T]) -> _T:
        """The result of a call of the store."""
        try:
            # In a thread of its own: a call of a store whose host has vanished cannot be cancelled.
            return in_thread(call, name="syncline-session-ask").result(self._timeout_s)
        except (RuntimeError, TimeoutError) as error:
            raise self._error(error) from error

    def wait_for(self, key: str, *, store: Store) -> bytes:
        """The value of a key that another rank will set."""
        while not self.ask(lambda: store.check([key])):
            if self._peers.alarm_text() is not None or self._peers.silent():
                raise self._error()
            time.sleep(_POLL_S)
        value: bytes = self.ask(lambda: store.get(key))
        return value

    def barrier(self, name: str, *, store: Store) -> None:
        """Wait for all ranks, without a process group. A rank may be busy for hours, but not without heartbeats."""
        if self.ask(lambda: store.add(f"{name}-count", 1)) == self._world_size:
            self.ask(lambda: store.set(f"{name}-all", "1"))
        self.wait_for(f"{name}-all", store=store)

    def leave(self) -> None:
        """All ranks leave together; rank 0, which may serve the store, goes last."""
        store = PrefixStore("syncline/session/end", self.store)
        self.barrier("end", store=store)
        self._peers.close()
        deadline = time.monotonic() + self._timeout_s
        left = self.ask(lambda: store.add("left", int(self._rank != 0)))
        while self._rank == 0 and left < self._world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = self.ask(lambda: store.add("left", 0))

    def let_rank_0_save(self, error: PeerError) -> None:
        """After `error`: a launcher ends all ranks when one fails, so the others wait until rank 0 has saved."""
        store = PrefixStore("syncline/session/saved", self.store)
        with suppress(PeerError):
            if self._rank == 0:
                self.ask(lambda: store.set("saved", "1"))
            deadline = time.monotonic() + min(_SAVING_S, self._timeout_s)
            while 0 not in error.ranks and time.monotonic() < deadline and not self.ask(lambda: store.check(["saved"])):
                time.sleep(_POLL_S)

    def _error(self, cause: BaseException | None = None) -> PeerError:
        return self._peers.explain("waiting for the other ranks", cause)
