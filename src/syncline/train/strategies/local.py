"""`local`: every rank trains by itself on its share of the batch; compute alone, with all ranks at once."""

from syncline.train.strategies.base import Strategy, strategy


@strategy("local")
class Local(Strategy):
    """Nothing is exchanged, so replicas drift apart: it says what a step would take if the network cost nothing."""

    formula = "0"
