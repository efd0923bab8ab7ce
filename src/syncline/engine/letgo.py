"""Closing what the garbage collector found: it may run on any thread, and at another time on every rank."""

import threading
import weakref
from collections.abc import Callable
from typing import Any


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
