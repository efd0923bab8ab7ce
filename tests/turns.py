"""Strategies for tests of turns: `turns:Raising` trains like `local` until one rank breaks."""

from syncline.train.strategies import Strategy, Synchroniser


class _Raising(Synchroniser):
    steps = 0

    def synchronise(self):
        self.steps += 1
        if self.steps == 3 and self.context.rank == 1:
            raise ArithmeticError("broke on purpose")


class Raising(Strategy):
    synchroniser = _Raising
