"""The exchange patterns, one per file; importing this package registers them."""

from syncline.exchange.patterns import (
    allgather,
    allreduce,
    gather_scatter,
    hierarchical,
    ring,
    server,
    sharded,
)

__all__ = ["allgather", "allreduce", "gather_scatter", "hierarchical", "ring", "server", "sharded"]
