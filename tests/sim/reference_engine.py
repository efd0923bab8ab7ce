"""An independent reference: the engine as threads that sleep, compute, send and wait, one step after the other.

Nothing is shared with `syncline.sim` but the scenario: no event queue, no virtual clocks, no cycle. Every process is a
generator; time goes on by `dt` at most, and by what is left of the shortest piece of work.
"""

import math
from collections.abc import Generator
from typing import Any

from syncline.sim import Scenario

Process = Generator[tuple[str, Any], None, None]
_CRUMB = 1e-12


class Engine:
    def __init__(self, scenario: Scenario, steps: int) -> None:
        self.s, self.steps = scenario, steps
        self.now = 0.0
        self.starts: list[float] = []
        self.step = -1
        self.over = False
        self.updated = [True] * len(scenario.update)
        self._begin()

    def _begin(self) -> None:
        jobs = self.s.jobs
        self.ready, self.next, self.stepped = [False] * len(jobs), 0, False
        self.done = [False] * len(jobs)
        self.issued, self.sent = [0] * 9, [0] * 9
        self.tasks: list[int] = []

    def _exchanged(self, unit: int) -> bool:
        return all(done for job, done in zip(self.s.jobs, self.done, strict=True) if job.unit == unit)

    def trainer(self) -> Process:
        s = self.s
        units = range(len(s.update))
        for _ in range(self.steps):
            self.starts.append(self.now)
            yield "busy", s.data
            for layer in s.layers:
                yield "until", lambda needs=layer.needs: all(self.updated[u] for u in needs)
                yield "busy", layer.forward
            yield "until", lambda: all(self.updated)
            self._begin()
            self.updated = [False] * len(s.update)
            for i in reversed(range(len(s.layers))):
                yield "busy", s.layers[i].backward
                for j, job in enumerate(s.jobs):
                    if job.ready == i:
                        self.ready[j] = True
            if s.rival:
                yield "until", lambda: all(self.done)
                yield "busy", sum(s.update)
                self.updated = [True] * len(s.update)
            else:
                self.stepped = True
                self.tasks = [u for u in units if self._exchanged(u)]
        self.starts.append(self.now)
        self.over = True

    def worker(self) -> Process:
        jobs = self.s.jobs
        while True:
            yield "until", lambda: self.tasks or (self.next < len(jobs) and self.ready[self.next])
            if self.next < len(jobs) and self.ready[self.next]:
                self.next += 1
                yield from self._carry(self.next - 1)
            else:
                yield from self._update(self.tasks.pop(0))

    def _carry(self, j: int) -> Process:
        s = self.s
        job = s.jobs[j]
        yield "busy", job.encode
        for r, one in enumerate(job.rounds):
            mine = sum(len(before.rounds) > r for before in s.jobs[:j])
            turns = self.issued if s.pipelined else self.sent
            yield "until", lambda t=turns, r=r, mine=mine: t[r] == mine
            self.issued[r] += 1
            yield "sleep", one.latency
            yield "until", lambda r=r, mine=mine: self.sent[r] == mine
            yield "wire", one.wire
            self.sent[r] += 1
            yield "busy", job.between if r + 1 < len(job.rounds) else job.decode
        if not job.rounds:
            yield "busy", job.decode
        self.done[j] = True
        if self.stepped and self._exchanged(job.unit):
            yield from self._update(job.unit)

    def _update(self, unit: int) -> Process:
        yield "busy", self.s.update[unit]
        self.updated[unit] = True


def reference_step(scenario: Scenario, *, steps: int = 5, dt: float = math.inf) -> float:
    """The mean of the last two of `steps` steps that start from rest."""
    engine = Engine(scenario, steps)
    processes = [engine.trainer(), *(engine.worker() for _ in range(scenario.lanes))]
    doing: list[list[Any]] = [list(next(process)) for process in processes]
    while not engine.over:
        moved = True
        while moved and not engine.over:
            moved = False
            for process, work in zip(processes, doing, strict=True):
                kind, left = work
                if left() if kind == "until" else left <= _CRUMB:
                    try:
                        work[:] = next(process)
                    except StopIteration:
                        break
                    moved = True
        rates = _rates(scenario, doing)
        ahead = min((work[1] / rate for work, rate in zip(doing, rates, strict=True) if rate), default=math.inf)
        ahead = min(ahead, dt)
        assert ahead < math.inf or engine.over
        if not engine.over:
            engine.now += ahead
        for work, rate in zip(doing, rates, strict=True):
            if rate:
                work[1] -= ahead * rate
    return (engine.starts[-1] - engine.starts[-3]) / 2


def _rates(s: Scenario, doing: list[list[Any]]) -> list[float]:
    busy = sum(kind == "busy" for kind, _ in doing)
    wire = sum(kind == "wire" for kind, _ in doing)
    slowed = 1 + s.contention * (busy - 1) + s.drag * (wire > 0)
    speed = {"busy": 1 / slowed if busy else 0.0, "wire": 1 / wire if wire else 0.0}
    return [speed.get(kind, 1.0 if kind == "sleep" else 0.0) for kind, _ in doing]
