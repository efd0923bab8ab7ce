"""The registry of codecs, and the decorator that adds one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from syncline.codecs.coder import Coder
from syncline.errors import UsageError
from syncline.registry import Registry


@dataclass(frozen=True)
class Definition:
    """A registered codec: its generator function and what it declares about itself. Calling it calls the function."""

    name: str
    function: Callable[..., Any]
    feedback: bool | str
    view: str
    carries: str
    tail: Callable[..., Coder] | None
    takes: tuple[str, ...]
    native: bool
    spread: bool
    wraps: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


CODECS: Registry[Definition] = Registry("codec")


def codec(
    name: str,
    *,
    feedback: bool | str = False,
    view: str = "flat",
    carries: str = "nothing",
    tail: Callable[..., Coder] | None = None,
    takes: tuple[str, ...] = (),
    native: bool = False,
    spread: bool = False,
    wraps: bool = False,
) -> Callable[[Callable[..., Any]], Definition]:
    """Register the generator function `function(grad, state, *, options)` as codec `name`.

    It yields requests and returns an `Out`. What it declares:

    - `feedback`: `True` wraps error feedback around it; `"own"` if it calls `state.compensate` itself.
    - `view`: `"flat"` is given a 1-d gradient; `"matrix"` a batch of matrices (k, n, m), or 1-d what is not one.
    - `carries`: the floats that it puts on the wire: `"gradient"`, `"values"`, `"factors"`, `"scales"`, or `"nothing"`.
    - `tail`: `tail(**options)` gives the coder with which it may end a chain, on what `takes` lists.
    - `native`: it wants float64 gradients as they are; others are given float32.
    - `spread`: one nan or inf makes the whole gradient nan before the codec sees it, so that none stays unseen.
    - `wraps`: its first option is a codec, given to it built, as `inner`.
    """
    if feedback not in (True, False, "own"):
        raise UsageError(f"codec '{name}': feedback is {feedback!r}; use True, False or 'own'")
    if view not in ("flat", "matrix"):
        raise UsageError(f"codec '{name}': view is '{view}'; use 'flat' or 'matrix'")

    def add(function: Callable[..., Any]) -> Definition:
        made = Definition(name, function, feedback, view, carries, tail, takes, native, spread, wraps)
        return CODECS.register(name)(made)

    return add
