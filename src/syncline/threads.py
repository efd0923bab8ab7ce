"""Run a function in a thread of its own; standard library only."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T], *, name: str) -> Future[T]:
    """Call `function` in a new daemon thread, which a blocked call does not keep alive; the future has its outcome."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
