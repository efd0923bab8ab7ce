"""Import of a user's function or class from `package.module:name`, with errors that say what is missing."""

import importlib
import sys
from pathlib import Path
from typing import Any

from syncline.errors import UsageError


def import_callable(path: str, kind: str) -> Any:
    """The function or class at `package.module:name`. Modules in the current folder are found too."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{kind} '{path}': write package.module:factory")
    module = _import(module_name, f"{kind} '{path}'")
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = ", ".join(name for name in sorted(vars(module)) if not name.startswith("_"))
            raise UsageError(f"{kind} '{path}': module {module_name} has no '{attribute}' (it has: {public})")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{kind} '{path}' is a {type(found).__name__}: a function or class is needed")
    return found


def _import(name: str, asked: str) -> Any:
    # The path of an installed command lacks the current folder; that of `python -m` has it.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"{asked}: importing {name} failed, it needs the module {error.name}") from error
        raise UsageError(
            f"{asked}: there is no module {error.name}: run from its folder, or install its package"
        ) from None
