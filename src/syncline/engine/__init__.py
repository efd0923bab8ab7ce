"""The engine: when. Hooks, launch order, threads and streams, waits and state; see docs/engine.md."""

from syncline.engine.attach import attach
from syncline.engine.sync import Sync

__all__ = ["Sync", "attach"]
