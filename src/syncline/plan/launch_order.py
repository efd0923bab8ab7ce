"""Search for the best launch order: greedy list scheduling, then local search with the simulator.

One network link, gradients with a release time and a due time: this is single-machine scheduling with release dates
and minimal maximal lateness. So the search starts like Carlier's algorithm: order greedily, find the part that the
training thread waited for, delay a part that went before it, and order again. Then it tries single moves, beginning
with the parts that were waited for.
"""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby

from syncline.sim import Outcome, Scenario, Transfer, simulate

ENOUGH = 1e-3
"""The search stops when the step is within this share of the bound."""
SLACK = 0.01
"""An order may be slower by this share if it is less sensitive to measurement errors."""
MEASUREMENT_ERROR = 1.1
"""Assumed factor by which measurements may be wrong."""
_LEAST = 1e-6
_HELD = 24
_STARTS = 6
_STEADY = 32


def greedy_order(ready: Sequence[float], wire: Sequence[float], need: Sequence[int]) -> list[int]:
    """Greedy order of parts on a network that sends one part at a time, without preemption.

    Part i can be sent from time `ready[i]` on and takes `wire[i]`. A lower `need[i]` means that it is needed earlier.
    Whenever the network is free it takes the ready part with the lowest need; with none ready it waits for the next.
    Ties go to the lower index.

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


def arrange(base: Scenario, *, launches: int, steady: bool = False) -> tuple[list[int], float]:
    """The best order of the scenario's jobs that the search finds, and its step.

    `launches`: how many jobs may be simulated in total. Work is counted and not timed, so all ranks find the same
    order. `steady`: among orders that are about equal, take the one that is also good on a slower network and with
    slower compute.
    """
    if not base.jobs:
        return [], simulate(base).step
    # The order does not change the host time, so search without it.
    host, base = base.host, base.with_(host=0.0)
    trials = _Trials(base, launches)
    begun = sorted((trials(order).step, n, order) for n, order in enumerate(_starts(trials)))
    kept: list[tuple[float, list[int]]] = []
    for step, _, order in begun:
        if all(trials.key(order) != trials.key(other) for _, other in kept):
            kept.append((step, order))
    best_step, best = kept[0]
    for step, order in kept[:2]:
        order, step = _descend(trials, order, step)
        if step < best_step:
            best, best_step = order, step
    rng = random.Random(0)
    while trials.left > 0 and not trials.enough(best_step):
        trial = _shuffled(best, base, rng)
        order, step = _descend(trials, trial, trials(trial).step)
        if step < best_step * (1 - _LEAST):
            best, best_step = order, step
    if steady:
        best, best_step = _steadiest(trials, best_step)
    return best, max(best_step, host)


def _steadiest(trials: "_Trials", best: float) -> tuple[list[int], float]:
    """The least sensitive of the best orders: the very best may depend on times that no real step has exactly."""
    good = sorted(
        (seen.step, n, order) for n, (seen, order) in enumerate(trials.seen()) if seen.step <= best * (1 + SLACK)
    )
    other = [_slower(trials.base, wire=MEASUREMENT_ERROR), _slower(trials.base, compute=MEASUREMENT_ERROR)]
    if trials.base.drag:
        other.append(trials.base.with_(drag=0.0))  # drag is the least reliable measurement on a busy machine

    def step_with_errors(entry: tuple[float, int, list[int]]) -> tuple[float, float]:
        return entry[0] + sum(simulate(one.ordered(entry[2])).step for one in other), entry[0]

    step, _, order = min(good[:_STEADY], key=step_with_errors)
    return order, step


def _slower(base: Scenario, *, wire: float = 1.0, compute: float = 1.0) -> Scenario:
    return base.with_(
        layers=tuple(replace(a, forward=a.forward * compute, backward=a.backward * compute) for a in base.layers),
        jobs=tuple(replace(j, rounds=tuple(Transfer(r.latency, r.wire * wire) for r in j.rounds)) for j in base.jobs),
    )


def greedy_launch_order(base: Scenario) -> list[int]:
    """Greedy order of a scenario's jobs: of the ready jobs, first the one that is needed first."""
    return greedy_order(ready_times(base), _wire(base), first_needs(base))


def ready_times(base: Scenario) -> list[float]:
    """When each job could be sent, from the start of the backward pass."""
    ends, now = [0.0] * len(base.layers), 0.0
    for at in range(len(base.layers) - 1, -1, -1):
        now += base.layers[at].backward
        ends[at] = now
    return [ends[job.ready] + job.encode for job in base.jobs]


def first_needs(base: Scenario) -> list[int]:
    """For each job, the layer whose forward waits for its unit."""
    first = {unit: at for at, layer in enumerate(base.layers) for unit in layer.needs}
    return [first.get(job.unit, len(base.layers)) for job in base.jobs]


def _wire(base: Scenario) -> list[float]:
    return [sum(one.wire + one.latency for one in job.rounds) for job in base.jobs]


class _Trials:
    """Simulations of one scenario in different orders, each done once, until the budget is spent."""

    def __init__(self, base: Scenario, launches: int) -> None:
        self.base, self.left = base, launches
        self.ready, self.wire, self.need = ready_times(base), _wire(base), first_needs(base)
        # Parts of a unit are equal: orders that only swap them count as one.
        first: dict[object, int] = {}
        self._kind = [first.setdefault(job, at) for at, job in enumerate(base.jobs)]
        self._seen: dict[tuple[int, ...], tuple[Outcome, list[int]]] = {}
        self.bound = max(base.compute, base.wire)

    def key(self, order: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._kind[i] for i in order)

    def __call__(self, order: Sequence[int]) -> Outcome:
        key = self.key(order)
        if key not in self._seen:
            self.left -= len(key) + 10
            self._seen[key] = simulate(self.base.ordered(order)), list(order)
        else:
            self.left -= 1
        return self._seen[key][0]

    def seen(self) -> list[tuple[Outcome, list[int]]]:
        return list(self._seen.values())

    def enough(self, step: float) -> bool:
        return step <= self.bound * (1 + ENOUGH)


def _starts(trials: _Trials) -> Iterator[list[int]]:
    base, ready, need = trials.base, trials.ready, trials.need
    everything = range(len(base.jobs))
    yield list(everything)
    yield from _carlier(trials)
    fifo = sorted(everything, key=lambda i: (ready[i], -need[i]))
    yield fifo
    late = sorted(set(need), reverse=True)
    for count in range(1, min(_STARTS, len(late))):
        last = set(late[:count])
        yield [i for i in fifo if need[i] not in last] + _by_need([i for i in fifo if need[i] in last], need)
    yield _by_need(fifo, need)
    sizes: dict[int, float] = {}
    for i in everything:
        sizes[need[i]] = sizes.get(need[i], 0.0) + trials.wire[i]
    for large in sorted(sizes, key=lambda n: -sizes[n])[:_STARTS]:
        yield [i for i in fifo if need[i] != large] + [i for i in fifo if need[i] == large]


def _by_need(order: Sequence[int], need: Sequence[int]) -> list[int]:
    return sorted(order, key=lambda i: need[i])


def _carlier(trials: _Trials) -> Iterator[list[int]]:
    """Greedy orders; each delays a part that made the training thread wait in the previous order."""
    ready, need = list(trials.ready), trials.need
    for _ in range(_HELD):
        order = greedy_order(ready, trials.wire, need)
        yield order
        outcome = trials(order)
        if not outcome.waits or trials.enough(outcome.step) or trials.left <= 0:
            return
        # All lateness has added up in the last wait.
        place = _last_place(order, trials.base, outcome.waits[-1].unit)
        if place is None:
            return
        urgent = need[order[place]]
        before = [at for at in range(place) if need[order[at]] > urgent]
        if not before:
            return
        after = [order[at] for at in range(before[-1] + 1, place + 1)]
        ready[order[before[-1]]] = max(ready[i] for i in after) + _LEAST * trials.bound


def _last_place(order: Sequence[int], base: Scenario, unit: int) -> int | None:
    return max((at for at, i in enumerate(order) if base.jobs[i].unit == unit), default=None)


def _descend(trials: _Trials, order: list[int], step: float) -> tuple[list[int], float]:
    """Take the first move that helps and repeat, until none helps or the budget is spent."""
    found = True
    while found and trials.left > 0 and not trials.enough(step):
        found = False
        for trial in _moves(trials, order):
            predicted = trials(trial).step
            if predicted < step * (1 - _LEAST):
                order, step, found = trial, predicted, True
                break
            if trials.left <= 0:
                break
    return order, step


def _moves(trials: _Trials, order: list[int]) -> Iterator[list[int]]:
    yield from _moves_for_waits(trials, order)
    blocks = _blocks(order, trials.base)
    sizes = [sum(trials.wire[i] for i in block) for block in blocks]
    by_size = sorted(range(len(blocks)), key=lambda b: -sizes[b])
    for width in (1, 2, 3):  # a block, then runs of blocks
        for b in by_size[: 16 if width == 1 else 8]:
            run = [i for block in blocks[b : b + width] for i in block]
            rest = blocks[:b] + blocks[b + width :]
            for at in _spread(len(rest) + 1, 12):
                if at != b:
                    yield _flat(rest[:at]) + run + _flat(rest[at:])
    for a, b in combinations(sorted(by_size[:10]), 2):
        swapped = list(blocks)
        swapped[a], swapped[b] = blocks[b], blocks[a]
        yield _flat(swapped)


def _moves_for_waits(trials: _Trials, order: list[int]) -> Iterator[list[int]]:
    """Move a part that was waited for earlier, or move parts that are needed later behind it."""
    need, wire = trials.need, trials.wire
    for wait in sorted(trials(order).waits, key=lambda w: -w.seconds)[:3]:
        place = _last_place(order, trials.base, wait.unit)
        if place is None:
            continue
        urgent = need[order[place]]
        head, tail = order[: place + 1], order[place + 1 :]
        blocks = _blocks(head, trials.base)
        later = [b for b, block in enumerate(blocks) if need[block[0]] > urgent]
        for b in sorted(later, key=lambda b: -sum(wire[i] for i in blocks[b]))[:8]:
            for kept in sorted({0, len(blocks[b]) // 2}):
                moved = blocks[b][kept:]
                rest = _flat(blocks[:b]) + blocks[b][:kept] + _flat(blocks[b + 1 :])
                yield rest + moved + tail
                yield rest + _by_need(moved + tail, need)
        mine = [i for i in head if trials.base.jobs[i].unit == wait.unit]
        others = [i for i in head if trials.base.jobs[i].unit != wait.unit]
        for at in _spread(len(others), 12):
            yield others[:at] + mine + others[at:] + tail


def _blocks(order: Sequence[int], base: Scenario) -> list[list[int]]:
    """Runs of jobs of one unit."""
    return [list(block) for _, block in groupby(order, key=lambda i: base.jobs[i].unit)]


def _flat(blocks: Sequence[Sequence[int]]) -> list[int]:
    return [i for block in blocks for i in block]


def _spread(count: int, most: int) -> list[int]:
    """At most `most` numbers of range(count), evenly spaced, including both ends."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


def _shuffled(order: Sequence[int], base: Scenario, rng: random.Random) -> list[int]:
    """The order with three blocks moved to random places."""
    blocks = _blocks(order, base)
    for _ in range(3):
        block = blocks.pop(rng.randrange(len(blocks)))
        blocks.insert(rng.randint(0, len(blocks)), block)
    return _flat(blocks)
