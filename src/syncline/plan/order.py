"""The launch order by greedy list scheduling: of what is ready, first what the next forward needs first."""

import heapq
import math
from collections.abc import Sequence


def greedy_order(ready: Sequence[float], wire: Sequence[float], need: Sequence[int]) -> list[int]:
    """The order in which a wire that sends one part at a time, without preemption, takes the parts.

    Part i can be sent from time `ready[i]` on, takes the wire for `wire[i]`, and is needed the earlier the lower
    `need[i]` is. Whenever the wire is free it takes the ready part with the lowest need; with none ready it waits
    for the next. Ties go to the lower index.

    >>> greedy_order(ready=[2, 1, 0, 0, 0], wire=[1, 1, 1, 1, 1], need=[0, 1, 2, 2, 2])
    [2, 1, 0, 3, 4]
    """
    waiting = [(when, index) for when, index, _ in zip(ready, range(len(wire)), need, strict=True)]
    heapq.heapify(waiting)
    urgent: list[tuple[int, int]] = []
    order: list[int] = []
    now = -math.inf
    while waiting or urgent:
        if not urgent:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, index = heapq.heappop(waiting)
            heapq.heappush(urgent, (need[index], index))
        _, index = heapq.heappop(urgent)
        order.append(index)
        now += wire[index]
    return order
