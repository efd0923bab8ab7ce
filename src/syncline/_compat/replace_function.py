"""Replacing a function or method of torch, and putting it back."""

import functools
from collections.abc import Callable
from typing import Any


def replace_function(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a module's function by `around(original, *args, **kwargs)`; returns a function that restores it."""
    original = getattr(owner, name)
    lost = False

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if lost else around(original, *args, **kwargs)

    def restore() -> None:
        nonlocal lost
        lost = True
        # If somebody has replaced our function, theirs stays and calls the original through ours.
        if getattr(owner, name) is replaced:
            setattr(owner, name, original)

    setattr(owner, name, replaced)
    return restore
