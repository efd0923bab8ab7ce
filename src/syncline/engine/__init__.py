"""The engine: when gradients are exchanged and parameters updated; see docs/engine.md."""

from syncline.engine.attach import attach
from syncline.engine.sync import Sync

__all__ = ["Sync", "attach"]
