"""Freezing the first blocks of a model while it trains; see docs/pipeline.md."""

from syncline.pipeline.freeze.freezer import Freezer
from syncline.pipeline.freeze.policies import FREEZE_POLICIES, Progress
from syncline.pipeline.freeze.state import Change, FreezeState, Measured, advance, start

__all__ = ["FREEZE_POLICIES", "Change", "FreezeState", "Freezer", "Measured", "Progress", "advance", "start"]
