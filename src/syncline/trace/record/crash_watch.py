"""A thread that learns through the store that another rank's loop has failed.

The ranks that are left are blocked in a collective then, and their launcher ends them as soon as the failed rank exits.
So the failed rank waits a moment, while this thread of the others contributes their spans to the trace.
"""

import threading
from collections.abc import Callable

from syncline._compat.groups import Store

_KEY = "crashed"
_POLL_S, _JOIN_S = 0.5, 1.0


class CrashWatch:
    """Calls `on_crash` in its own thread once a rank has called `announce_crash`."""

    def __init__(self, store: Store, on_crash: Callable[[], None]) -> None:
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(store, on_crash), name="syncline-crash", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop using the store."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self, store: Store, on_crash: Callable[[], None]) -> None:
        try:
            while not self._closed.wait(_POLL_S):
                if store.check([_KEY]):
                    on_crash()
                    return
        except (RuntimeError, ValueError, OSError):
            return  # the store is gone: the end of the recording reports it


def announce_crash(store: Store) -> None:
    """Tell the other ranks that this one's loop has failed."""
    store.set(_KEY, "1")
