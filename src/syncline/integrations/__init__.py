"""Integrations with other training loops: a DDP hook and a DDP wrapper; see docs/integrations.md."""

from syncline.integrations.ddp_hook import ddp_hook
from syncline.integrations.ddp_wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "ddp_hook"]
