"""Syncline: data-parallel PyTorch training that is fast on the network you have, and explains itself."""

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PACKAGES = ("codecs", "exchange", "plan", "trace")
_NAMES = {
    "attach": "syncline.engine",
    "DistributedDataParallel": "syncline.engine",
    "ddp_hook": "syncline.integrations",
}


def __getattr__(name: str) -> Any:
    # On first use: `import syncline` itself costs nothing.
    if name in _PACKAGES:
        return import_module(f"syncline.{name}")
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'syncline' has no attribute '{name}'")


if os.environ.get("SYNCLINE_TRACE"):
    import_module("syncline.trace.record.environment").start_if_requested()
