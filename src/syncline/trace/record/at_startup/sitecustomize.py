"""Imported by Python at its start, if this folder is on PYTHONPATH: starts a recording when torch is imported.

`python -m syncline.trace run` puts it there, so that scripts are recorded that do not import Syncline, and so are the
processes that they start. A process that does not import torch pays for this file alone.
"""

import logging
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any


class _AfterTorch(MetaPathFinder):
    """Finds torch as usual, and starts the recording when its import is complete."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _start()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _start() -> None:
    try:
        from syncline.trace.record.session import start_if_requested

        start_if_requested()
    except Exception as error:
        logging.getLogger("syncline").warning("syncline: nothing is recorded: %s: %s", type(error).__name__, error)


def _import_the_hidden_one() -> None:
    """Import the `sitecustomize` that Python would have found without this folder."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _AfterTorch())
    _import_the_hidden_one()
