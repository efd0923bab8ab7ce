"""Import of a user's own class or function by `package.module:name`, with a check of what it is before it is called."""

import functools
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from syncline import trust
from syncline.errors import UsageError, short

_PLAIN = (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset, type(None))


def import_own(path: str, kind: str, *, instance: type | None, makes: tuple[type, ...]) -> Any:
    """The user's object at `package.module:name`. Modules in the current folder are found too.

    It is an `instance` of a type, or a class or function whose calls give one of the types in `makes` (empty: any).
    With both, either will do.
    """
    if not trust.is_import(path):
        raise UsageError(f"{kind} {short(path)}: write package.module:factory")
    trust.check_import(path, kind=kind)
    module_name, _, attribute = path.partition(":")
    _refuse_python(module_name, path, kind)
    found = _find(_import(module_name, path, kind), attribute, path, kind)
    if instance is not None and isinstance(found, instance):
        return found
    if instance is None or makes:
        _check_callable(found, path, kind, makes)
    else:
        raise UsageError(
            f"{kind} '{path}' is a {type(found).__name__}: a {kind} made by Syncline's decorator is needed"
        )
    return found


def _import(module_name: str, path: str, kind: str) -> ModuleType:
    # The path of an installed command lacks the current folder; that of `python -m` has it.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{kind} '{path}': importing {module_name} failed, it needs the module {error.name}"
            ) from error
        raise UsageError(
            f"{kind} '{path}': there is no module {error.name}: run from its folder, or install its package"
        ) from None


def _find(module: ModuleType, attribute: str, path: str, kind: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part) or isinstance(getattr(found, part), ModuleType):
            public = ", ".join(name for name in sorted(vars(module)) if not name.startswith("_"))
            raise UsageError(f"{kind} '{path}': module {module.__name__} has no '{attribute}' (it has: {public})")
        found = getattr(found, part)
    return found


def _check_callable(found: Any, path: str, kind: str, makes: tuple[type, ...]) -> None:
    while isinstance(found, functools.partial):
        found = found.func
    names = " or ".join(one.__name__ for one in makes)
    if isinstance(found, type):
        if makes and not issubclass(found, makes):
            raise UsageError(f"{kind} '{path}' is a class {found.__name__}, which is not a {names}: name another class")
    elif not inspect.isfunction(found):
        raise UsageError(f"{kind} '{path}' is a {type(found).__name__}: a function or class is needed")
    elif makes and (gives := _plain_result(found)):
        raise UsageError(f"{kind} '{path}' returns {gives}: name a function that returns a {names}")
    _refuse_python(found.__module__ or "", path, kind)


def _plain_result(function: Any) -> str | None:
    """The annotated result of a function, if it is a plain value such as a number."""
    given = inspect.signature(function).return_annotation
    plain = {one.__name__ for one in _PLAIN} | {"None"}
    name = given if isinstance(given, str) else "None" if given is None else getattr(given, "__name__", "")
    return name if name in plain else None


def _refuse_python(module_name: str, path: str, kind: str) -> None:
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise UsageError(f"{kind} '{path}' is a part of Python: name a class or function of your own")
