"""`WaitingState`: an optimizer's `state` that waits for updates in flight, and stays in parameter order."""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

import torch

from syncline._compat.tensors import storage_users


class WaitingState(defaultdict):  # type: ignore[type-arg]
    """An optimizer's `state`: every use waits for the updates in flight first.

    Updates arrive in another order on every rank. Their new entries are kept apart and inserted at the next use, in the
    order in which the optimizer's own `step` would have made them.
    """

    def __init__(self, content: Mapping[Any, Any], wait: Callable[[], None]) -> None:
        super().__init__(getattr(content, "default_factory", None), content)
        self._wait = wait
        self._expected: dict[Any, None] = {}
        """Parameters of the steps since the last use, in their order."""
        self._arrived: dict[Any, dict[str, Any]] = {}
        """Entries that updates have made since."""
        self.was_used = bool(content)
        """Whether others than the engine may have taken entries or tensors out of it."""

    # -- for the engine, without waiting

    def begin_step(self, parameters: Iterable[Any], *, settled: bool) -> None:
        """An optimizer is about to step these parameters; `settled`: no update of it is in flight."""
        if settled:
            self._insert_arrived()
        self._expected.update(dict.fromkeys(parameters))

    def entry(self, parameter: Any) -> dict[str, Any] | None:
        """The state of one parameter, if it has any. From any thread."""
        found: dict[str, Any] | None = dict.get(self, parameter)
        return self._arrived.get(parameter) if found is None else found

    def put(self, parameter: Any, entry: dict[str, Any]) -> None:
        """An update has made or replaced the state of one parameter. From any thread."""
        if dict.__contains__(self, parameter):
            dict.__setitem__(self, parameter, entry)
        else:
            self._arrived[parameter] = entry

    def is_held(self, parameter: Any) -> bool:
        """Whether somebody else holds the parameter's entry, one of its tensors or their memory.

        Reads of those cannot wait. Values of unknown types count as held.
        """
        if not dict.__contains__(self, parameter):
            return False
        if _references(self, parameter) > _OUR_REFERENCES:
            return True
        entry = dict.__getitem__(self, parameter)
        return any(_is_value_held(entry, key) for key in list(entry))

    def plain(self) -> "defaultdict[Any, Any]":
        """The same entries without waiting at later uses."""
        self._before_use()
        return defaultdict(self.default_factory, {key: dict.__getitem__(self, key) for key in dict.__iter__(self)})

    def stop_waiting(self) -> None:
        """The engine has ended: nothing will be in flight any more."""
        self._wait = lambda: None

    # -- as a dict

    def _before_use(self) -> None:
        self._wait()
        self._insert_arrived()
        self.was_used = True

    def _insert_arrived(self) -> None:
        if self._arrived:
            for parameter in self._expected:
                if parameter in self._arrived:
                    dict.__setitem__(self, parameter, self._arrived[parameter])
            self._arrived = {}
        self._expected = {}

    # Views that go through the methods of this class, whenever they are used.

    def keys(self) -> Any:
        """As a dict's."""
        return KeysView(self)

    def items(self) -> Any:
        """As a dict's."""
        return ItemsView(self)

    def values(self) -> Any:
        """As a dict's."""
        return ValuesView(self)

    # Copies are plain: nobody updates them.

    def copy(self) -> Any:
        """As a dict's."""
        return self.plain()

    def __copy__(self) -> Any:
        return self.plain()

    def __reduce__(self) -> Any:
        return defaultdict, (self.default_factory,), None, None, iter(dict.items(self.plain()))

    def __or__(self, other: Any) -> Any:
        return self.plain() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.plain()

    def __repr__(self) -> str:
        return repr(self.plain())


def _waiting(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(self: WaitingState, *args: Any, **kwargs: Any) -> Any:
        self._before_use()
        return method(self, *args, **kwargs)

    return call


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__", "__len__", "__eq__",
    "__ne__", "__ior__", "get", "setdefault", "update", "pop", "popitem", "clear",
):  # fmt: skip
    setattr(WaitingState, _name, _waiting(_name))


def _references(container: dict[Any, Any], key: Any) -> int:
    """The number of references to a value in a dict, the dict's and those of this call included."""
    return sys.getrefcount(dict.__getitem__(container, key))


_OUR_REFERENCES = _references({"": object()}, "")


def is_held_by_others(container: dict[str, Any], key: str) -> bool:
    """Whether anybody but this dict holds the value of `key`."""
    return _references(container, key) > _OUR_REFERENCES


def _is_value_held(entry: dict[str, Any], key: str) -> bool:
    kind = type(dict.__getitem__(entry, key))
    if kind in (int, float, bool, str, type(None)):
        return False
    return kind is not torch.Tensor or is_held_by_others(entry, key) or storage_users(entry[key]) > 1
