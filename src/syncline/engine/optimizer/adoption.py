"""`Adopted`: an optimizer whose `step`, and what must wait for updates in flight, are the engine's until it closes."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from syncline._compat.optimizers import pass_for_step
from syncline.engine.optimizer.partial_step import steps_as_lists

_REPLACED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
_DECIDING = ("foreach", "fused", "differentiable")

_adopted: "weakref.WeakValueDictionary[int, Adopted]" = weakref.WeakValueDictionary()
"""By the optimizer's id, which is valid as long as its `Adopted` lives."""


class Methods(Protocol):
    """The engine's side of an adopted optimizer's methods."""

    def step(self, adopted: "Adopted", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's `optimizer.step(...)`."""

    def zero_grad(self, adopted: "Adopted", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The user's `optimizer.zero_grad(...)`."""

    def wait_then_call(self, adopted: "Adopted", name: str, *args: Any, **kwargs: Any) -> Any:
        """Another method, which must see no update in flight."""


class Adopted:
    """An optimizer and the engine that steps it.

    Only the optimizer refers to this object, through its replaced methods: so it keeps the engine alive, and the engine
    does not keep an optimizer that the user has dropped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, methods: Methods, *, whole: bool) -> None:
        """`whole`: it steps all parameters at once."""
        self.optimizer, self.methods, self.whole = optimizer, methods, whole
        self.shared = False
        """Whether it also has parameters of another engine's model."""
        self.original = {name: getattr(optimizer, name) for name in _REPLACED}
        self._before = {name: optimizer.__dict__.get(name) for name in _REPLACED}
        self._ours = {name: self._replacement(name) for name in _REPLACED}
        optimizer.__dict__.update(self._ours)
        self._restored = False
        self._looked_at: list[Any] = []
        self._small: list[int] = []
        _adopted[id(optimizer)] = self

    def _replacement(self, name: str) -> types.MethodType:
        original = self.original[name]

        @functools.wraps(getattr(original, "__func__", original))
        def method(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if optimizer is not self.optimizer:  # a copy that has all our attributes
                return getattr(type(optimizer), name)(optimizer, *args, **kwargs)
            if self._restored:  # called through a wrapper that somebody has put around it
                return original(*args, **kwargs)
            if name == "step":
                return self.methods.step(self, args, kwargs)
            if name == "zero_grad":
                return self.methods.zero_grad(self, args, kwargs)
            return self.methods.wait_then_call(self, name, *args, **kwargs)

        method.__name__ = name  # by this name it is pickled: as the class's own method
        pass_for_step(method, original)
        return types.MethodType(method, self.optimizer)

    def groups_of_small(self) -> list[int]:
        """The parameter groups that a whole step takes as lists; looked at again when what decides that changes."""
        groups = self.optimizer.param_groups
        now = [(len(g["params"]), *map(g.get, _DECIDING), *map(type, g.values())) for g in groups]
        if now != self._looked_at:
            self._looked_at = now
            self._small = [n for n, g in enumerate(groups) if steps_as_lists(self.optimizer, g, g["params"])]
        return self._small

    def restore(self) -> None:
        """Give the optimizer its own methods back."""
        self._restored = True
        attributes = self.optimizer.__dict__
        for name, ours in self._ours.items():
            if attributes.get(name) is not ours:
                continue
            if self._before[name] is None:
                del attributes[name]
            else:
                attributes[name] = self._before[name]
        _adopted.pop(id(self.optimizer), None)


def adopted(optimizer: torch.optim.Optimizer) -> Adopted | None:
    """Who steps this optimizer; None if it steps itself."""
    return _adopted.get(id(optimizer))


def replace_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], around: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a `step` with `around(closure)` for its closure; None if there is no closure."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": around(kwargs["closure"])}
    if args and callable(args[0]):
        return (around(args[0]), *args[1:]), kwargs
    return None
