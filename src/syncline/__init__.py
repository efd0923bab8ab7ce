"""Syncline: data-parallel PyTorch training that is fast on the network you have, and explains itself."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from syncline.errors import PeerError, SynclineWarning, UsageError
from syncline.version import VERSION

if TYPE_CHECKING:
    from syncline import codecs, exchange, plan, trace
    from syncline.engine.attach import attach
    from syncline.engine.sync import Sync
    from syncline.integrations import fsdp
    from syncline.integrations.ddp_hook import ddp_hook
    from syncline.integrations.ddp_wrapper import DistributedDataParallel

__version__ = VERSION

__all__ = [
    "DistributedDataParallel",
    "PeerError",
    "Sync",
    "SynclineWarning",
    "UsageError",
    "attach",
    "codecs",
    "ddp_hook",
    "exchange",
    "fsdp",
    "plan",
    "trace",
]

_MODULES = {
    "attach": "syncline.engine.attach",
    "Sync": "syncline.engine.sync",
    "DistributedDataParallel": "syncline.integrations.ddp_wrapper",
    "ddp_hook": "syncline.integrations.ddp_hook",
}

if not TYPE_CHECKING:  # a type checker sees the imports above, so that a misspelled name is an error

    def __getattr__(name: str) -> Any:
        # On first use, so that `import syncline` does not import torch.
        if name == "attach":
            import_module("syncline.pipeline.freeze")  # for attach(..., freeze=...): it comes after the engine
        if name in _MODULES:
            return getattr(import_module(_MODULES[name]), name)
        if name == "fsdp":
            return import_module("syncline.integrations.fsdp")
        if name in __all__:
            return import_module(f"syncline.{name}")
        raise AttributeError(f"module 'syncline' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


if os.environ.get("SYNCLINE_TRACE") or os.environ.get("SYNCLINE_WATCH"):
    import_module("syncline.trace.record.session").start_if_requested()
