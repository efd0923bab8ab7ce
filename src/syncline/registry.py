"""An open registry of names: a decorator over a dict, entry points of installed packages, and a user's own objects."""

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from syncline.errors import SynclineWarning, UsageError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one kind by name. Other packages add theirs through the entry-point group `syncline.<kind>`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
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

    def get(self, name: str) -> T:
        """The object called `name`, or an error that lists the names and the nearest one.

        `package.module:name` is imported instead of looked up: users need not register their objects.
        """
        if ":" in name:
            found: T = _import_callable(name, self.kind)
            return found
        if name not in self._items:
            self._load_entry_points()
        if name not in self._items:
            raise unknown(self.kind, name, self._items)
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


def _import_callable(path: str, kind: str) -> Any:
    """The user's function or class at `package.module:name`. Modules in the current folder are found too."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{kind} '{path}': write package.module:factory")
    # The path of an installed command lacks the current folder; that of `python -m` has it.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{kind} '{path}': importing {module_name} failed, it needs the module {error.name}"
            ) from error
        raise UsageError(
            f"{kind} '{path}': there is no module {error.name}: run from its folder, or install its package"
        ) from None
    public = ", ".join(name for name in sorted(vars(found)) if not name.startswith("_"))
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{kind} '{path}': module {module_name} has no '{attribute}' (it has: {public})")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{kind} '{path}' is a {type(found).__name__}: a function or class is needed")
    return found
