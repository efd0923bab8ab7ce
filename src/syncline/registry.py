"""An open registry of names: a decorator over a dict, entry points of installed packages, and a user's own objects."""

import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from syncline.errors import SynclineWarning, UsageError, unknown
from syncline.user_import import import_own

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one kind by name. Other packages add theirs through the entry-point group `syncline.<kind>`.

    `instance` is the type of its objects; without it they are classes or functions.
    """

    def __init__(self, kind: str, *, label: str | None = None, instance: type[T] | None = None) -> None:
        """`label`: what a message calls one object, if that is not the name of the kind."""
        self.kind, self._label = kind, label or kind
        self._instance = instance
        self._items: dict[str, T] = {}
        self._searched = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that registers its object as `name`; a name can be used once."""

        def add(item: T) -> T:
            if name in self._items:
                raise UsageError(f"{self.kind} '{name}' is registered twice: choose another name")
            self._items[name] = item
            return item

        return add

    def get(self, name: str, *, makes: tuple[type, ...] = ()) -> T:
        """The object called `name`, or an error that lists the names and the nearest one.

        `package.module:name` is imported instead of looked up: users need not register their objects. Such a class or
        function must give one of the types `makes` when it is called. A name in somebody's file is refused (`trust`).
        """
        if ":" in name:
            found: T = import_own(name, self.kind, instance=self._instance, makes=makes)
            return found
        if name not in self._items:
            self._load_entry_points()
        if name not in self._items:
            raise unknown(self._label, name, self._items)
        return self._items[name]

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load_entry_points()
        return sorted(self._items)

    def _load_entry_points(self) -> None:
        if self._searched:
            return
        self._searched = True
        for point in entry_points(group=f"syncline.{self.kind}"):
            if point.name in self._items:
                continue
            try:
                self._items[point.name] = point.load()
            except Exception as error:  # a broken package must not make our own names unusable
                text = f"{self.kind} '{point.name}' of {point.value} cannot be loaded: {error}"
                warnings.warn(text, SynclineWarning, stacklevel=2)
