"""`single`: one rank trains on the whole batch; the reference of every comparison."""

from syncline.train.strategies.base import Strategy, strategy


@strategy("single")
class Single(Strategy):
    """No peers, nothing on the wire."""

    alone = True
    formula = "0"
