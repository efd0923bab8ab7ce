"""Strategies without communication: `single` (one rank, the whole batch) and `local` (all ranks, no exchange)."""

from syncline.train.strategies.base import Strategy, strategy


@strategy("single")
class Single(Strategy):
    """One rank trains on the whole batch; the reference of every comparison."""

    alone = True
    formula = "0"


@strategy("local")
class Local(Strategy):
    """Every rank trains on its share of the batch, so replicas drift apart: the step time of a network without cost."""

    formula = "0"
