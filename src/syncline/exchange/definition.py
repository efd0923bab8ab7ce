"""The registry of exchanges, and the decorator that adds one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from syncline.registry import Registry


@dataclass(frozen=True)
class Definition:
    """A registered exchange: generators for `Merge` and (if it can) `Gather`, and how many ranks have gradients."""

    name: str
    merge: Callable[..., Any]
    gather: Callable[..., Any] | None
    adds_only: bool
    workers: Callable[..., int] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.merge(*args, **kwargs)


EXCHANGES: Registry[Definition] = Registry("exchange", instance=Definition)


def exchange(
    name: str,
    *,
    gather: Callable[..., Any] | None = None,
    adds_only: bool = False,
    workers: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Definition]:
    """Register the generator function `function(merge, position, *, options)` as exchange `name`.

    The function yields moves and returns an `Out`. `gather(buffer, position)` serves `Gather`: it returns all buffers
    in rank order. `adds_only`: it sums payloads without decoding them. `workers(world, **options)`: how many ranks have
    gradients, if not all do.
    """

    def add(function: Callable[..., Any]) -> Definition:
        return EXCHANGES.register(name)(Definition(name, function, gather, adds_only, workers))

    return add
