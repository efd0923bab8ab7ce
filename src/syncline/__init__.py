"""Syncline: data-parallel PyTorch training that is fast on the network you have, and explains itself."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PACKAGES = ("codecs", "exchange", "trace")


def __getattr__(name: str) -> Any:
    # On first use: `import syncline` itself costs nothing.
    if name in _PACKAGES:
        return import_module(f"syncline.{name}")
    raise AttributeError(f"module 'syncline' has no attribute '{name}'")
