"""Closing what nobody closed: when the script ends, and when the garbage collector finds it (on any thread)."""

import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncline.engine.sync import Sync

_log = logging.getLogger("syncline")
_open: "weakref.WeakSet[Sync]" = weakref.WeakSet()


def close_at_exit(sync: "Sync") -> None:
    """See to it that an engine is closed when the script ends."""
    _open.add(sync)
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # again, so that it comes before what ends the heartbeats


def forget(sync: "Sync") -> None:
    """It was closed: nothing is left to do at the end."""
    _open.discard(sync)


def _close_all() -> None:
    """A script that ends without `close` still gets its last update, and leaves no thread in torch's way."""
    reason = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for sync in list(_open):
        try:
            sync._close(reason, leave=True)
        except Exception as error:
            _log.warning("syncline: at exit: %s", error)


def close_when_gone(owner: Any, close: Callable[[], None]) -> "weakref.finalize[..., Any]":
    """Call `close` when `owner` is no more; it must not refer to `owner`, and must be safe to call twice.

    The collector may run on a thread that `close` would wait for: then a thread of its own closes.
    """

    def let_go() -> None:
        if threading.current_thread().name.startswith("syncline-"):
            threading.Thread(target=close, name="syncline-closing", daemon=True).start()
        else:
            close()

    return weakref.finalize(owner, let_go)
