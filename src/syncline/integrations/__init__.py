"""Integrations: other people's training loops; see docs/integrations.md."""

from syncline.integrations.ddp_hook import ddp_hook

__all__ = ["ddp_hook"]
