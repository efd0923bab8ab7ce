"""The engine: when. Hooks, launch order, threads and streams, waits and state; see docs/engine.md."""

from syncline.engine.attach import attach
from syncline.engine.sync import Sync
from syncline.integrations.ddp_wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "Sync", "attach"]
