"""Close engines that the user did not close: at the end of the script, or when the garbage collector finds them."""

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

_log = logging.getLogger("syncline")


class Closable(Protocol):
    """An engine that is closed when the script ends."""

    def close_at_exit(self, reason: BaseException | None) -> None:
        """The script ends, with this error if it raised one."""

    def forked(self) -> None:
        """This is a forked child: nothing of the engine runs here."""


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_exit(engine: Closable) -> None:
    """Close the engine when the script ends."""
    _open.add(engine)
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # again, so that it runs before heartbeats end


def forget(engine: Closable) -> None:
    """The engine was closed: there is nothing left to do at exit."""
    _open.discard(engine)


def _close_all() -> None:
    """A script that ends without `close` still gets its last update, and leaves no thread running."""
    reason = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for engine in list(_open):
        try:
            engine.close_at_exit(reason)
        except Exception as error:
            _log.warning("syncline: at exit: %s", error)


def _leave_child() -> None:
    for engine in list(_open):
        engine.forked()
        _open.discard(engine)


os.register_at_fork(after_in_child=_leave_child)


def close_when_collected(owner: Any, close: Callable[[], None]) -> "weakref.finalize[..., Any]":
    """Call `close` when `owner` is garbage-collected; it must not refer to `owner`, and may be called twice.

    The collector may run on a thread that `close` would wait for: then another thread closes.
    """

    def collected() -> None:
        if threading.current_thread().name.startswith("syncline-"):
            threading.Thread(target=close, name="syncline-closing", daemon=True).start()
        else:
            close()

    return weakref.finalize(owner, collected)
