"""A callback for global registries that does not keep the object alive whose method it calls."""

import weakref
from collections.abc import Callable
from typing import Any


def weak_callback(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method as long as its object lives, and does nothing afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args, **kwargs)

    return call
