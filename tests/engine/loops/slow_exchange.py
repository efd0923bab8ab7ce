"""`loops.slow_exchange:slow(ms=4)`: an all-reduce with late answers, so that a missing wait shows as a stale value."""

import itertools
import time

import torch

from syncline.codecs import Merge, Out
from syncline.exchange.definition import EXCHANGES, Definition
from syncline.exchange.moves import Moves, Position

# By launch, in units of `ms`: some answers overtake others, and neighbours in time never take the same.
DELAYS = (1.0, 0.0, 2.0, 0.25, 0.0, 1.5, 0.5)
_numbers = itertools.count()
launched = [0]
"""How many launches this process has made: a test asserts that its exchange was used."""


def _merge(merge: Merge, place: Position, *, ms: float = 4) -> Moves:
    # The count is taken before the first communication: launches have the same order on every rank.
    delay = DELAYS[next(_numbers) % len(DELAYS)] * ms / 1000
    launched[0] += 1
    moves = EXCHANGES.get("allreduce").merge(merge, place)
    total = yield next(moves)
    # After the collective, so that it is the waiting thread that sleeps and not the one that launches.
    if merge.tensor.is_cuda:
        torch.cuda._sleep(int(delay * 1.5e9))  # the stream's clock ticks about so often a second
    else:
        time.sleep(delay)
    try:
        moves.send(total)
    except StopIteration as end:
        out: Out = end.value
        return out
    raise AssertionError("allreduce has one move")


# Not filed under a name: the lists of legal exchanges stay as they are.
slow = Definition("slow", _merge, None, True, None)
