"""Cache of the activations that the frozen layers of a model compute, shared by the ranks of a node."""

from syncline.pipeline.cache.activations import ActivationCache, shared_cache
from syncline.pipeline.cache.stats import CacheStats

__all__ = ["ActivationCache", "CacheStats", "shared_cache"]
