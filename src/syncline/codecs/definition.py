"""The registry of codecs, and the decorator that adds one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from syncline.codecs.coder import Coder
from syncline.errors import UsageError
from syncline.registry import Registry


@dataclass(frozen=True)
class Definition:
    """A registered codec: its generator function and its declared properties. Calling it calls the function."""

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
    captures: bool = False
    direct: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


CODECS: Registry[Definition] = Registry("codec", instance=Definition)


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
    captures: bool = False,
    direct: bool = False,
) -> Callable[[Callable[..., Any]], Definition]:
    """Register the generator function `function(grad, state, *, options)` as codec `name`.

    The function yields requests and returns an `Out`. Options of the decorator:

    - `feedback`: `True` adds error feedback; `"own"` if the codec calls `state.compensate` itself.
    - `view`: `"flat"` codecs get a 1-d gradient; `"matrix"` codecs get a batch of matrices (k, n, m), or a 1-d
      gradient if the parameter is not a matrix.
    - `carries`: the floats that it sends: `"gradient"`, `"values"`, `"factors"`, `"scales"`, or `"nothing"`.
    - `tail`: `tail(**options)` returns the coder for the end of a chain; `takes` lists what it can encode.
    - `native`: it gets float64 gradients as float64; other codecs get float32.
    - `spread`: one nan or inf makes the whole gradient nan before the codec sees it, so that it is always sent.
    - `wraps`: its first option is another codec, passed to it as `inner`.
    - `captures`: on CUDA its work may be captured once and replayed in every step. For that, it must do the same in
      every step: nothing may depend on values, on the step's number or on seeds.
    - `direct`: it yields one `Merge` of the gradient as it got it and returns the answer. Error feedback then happens
      while the gradient is encoded, in fewer passes over memory, and the gradient comes without the residual.
    """
    if feedback not in (True, False, "own"):
        raise UsageError(f"codec '{name}': feedback is {feedback!r}; use True, False or 'own'")
    if view not in ("flat", "matrix"):
        raise UsageError(f"codec '{name}': view is '{view}'; use 'flat' or 'matrix'")

    def add(function: Callable[..., Any]) -> Definition:
        flags = native, spread, wraps, captures, direct
        made = Definition(name, function, feedback, view, carries, tail, takes, *flags)
        return CODECS.register(name)(made)

    return add
