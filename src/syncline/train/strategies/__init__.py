"""Strategies of synchronising gradients, in an open registry: `STRATEGIES`, `load(spec)`."""

from syncline.train.strategies import byteps, classical, ddp, horovod, ring_dgc, syncline
from syncline.train.strategies.base import STRATEGIES, Context, Strategy, Synchroniser, Traffic, load, strategy

__all__ = ["STRATEGIES", "Context", "Strategy", "Synchroniser", "Traffic", "load", "strategy"]
_BUILT_IN = (classical, ddp, horovod, byteps, ring_dgc, syncline)
