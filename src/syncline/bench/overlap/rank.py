"""One rank of `bench overlap`: training pauses between steps until the coordinator orders the next turn.

Orders come through a pipe: a number of steps, or 0 to end. When the other end of the pipe closes (also because the
coordinator was killed), the rank exits at once, whatever it is doing.
"""

import os
import queue
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from syncline._compat.groups import FileStore
from syncline.cluster.ranks import Place, Report
from syncline.trace.span import STEP
from syncline.train.checkpoint.history import History
from syncline.train.rank.loop import Loop
from syncline.train.rank.network_counters import NetworkBytes, read_counters
from syncline.train.rank.worker import Assignment, run_rank
from syncline.train.strategies.syncline import plan_facts

_SHOWN_STEPS = 4
"""Steps at the end of a turn whose spans rank 0 reports, for the timeline."""


@dataclass(frozen=True)
class Work:
    """Arguments of the ranks of one contestant."""

    assignment: Assignment
    store: str
    orders: tuple[Connection, ...]
    """The receiving end of each rank's pipe, by rank."""
    count_wire: bool


class TurnGate:
    """Lets the loop run the ordered number of steps, and reports the figures of each turn."""

    def __init__(self, orders: Connection, report: Report, *, rank: int, count_wire: bool) -> None:
        self._report, self._rank, self._count_wire = report, rank, count_wire
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._until = 0
        self._began: tuple[int, int, NetworkBytes | None] | None = None
        threading.Thread(target=self._listen, args=(orders,), daemon=True).start()

    def due(self, step: int) -> bool:
        """Whether the ordered steps are done."""
        return step >= self._until

    def wait(self, loop: Loop, history: History) -> bool:
        """Report the turn that has ended (at first: that this rank is ready), and wait for the next order."""
        step = len(history.losses)
        if self._began is None:
            warm_up = max(synchroniser.steady_after for synchroniser in loop.synchronisers)
            self._report({"warm_up_steps": warm_up})
        else:
            self._report(self._turn(loop, history, *self._began))
        steps = self._orders.get()
        self._until = step + steps
        self._began = (step, time.perf_counter_ns(), self._reading())
        return steps > 0

    def _turn(
        self, loop: Loop, history: History, first: int, began: int, before: NetworkBytes | None
    ) -> dict[str, Any]:
        """Figures of one turn as plain numbers, timed by the host's monotonic clock, which all ranks here share."""
        ended, count = time.perf_counter_ns(), len(history.losses) - first
        now = self._reading()
        turn: dict[str, Any] = {"began": began, "ended": ended, "losses": history.losses[first:], "wire": None}
        turn["memory"] = None if loop.memory is None else loop.memory.peak()
        if now is not None and before is not None:
            turn["wire"] = asdict(now.per_step_since(before, steps=count))
        if self._rank == 0:
            spans = loop.context.recorder.spans(first)
            shown = first + count - _SHOWN_STEPS
            turn["steps"] = [[s.start, s.end] for s in spans if s.lane == STEP]
            # On a GPU, data is read ahead and timed by the host, so it does not fit beside the device's spans.
            left_out = {"data"} if loop.device.type == "cuda" else set()
            seen = [s for s in spans if s.step >= shown and s.lane not in left_out]
            turn["spans"] = [[s.lane, s.name, s.unit, s.step, s.start, s.end] for s in seen]
            turn["plans"] = plan_facts(loop.synchronisers)
        return turn

    def _reading(self) -> NetworkBytes | None:
        return read_counters() if self._count_wire else None

    def _listen(self, orders: Connection) -> None:
        """Receive orders in a thread, so that a rank notices a closed pipe also in the middle of a step."""
        steps = -1
        while steps:
            try:
                steps = int(orders.recv())
            except (EOFError, OSError):
                os._exit(1)
            self._orders.put(steps)


def run_in_turns(place: Place, work: Work, report: Report) -> str:
    """Train in turns until the order to end; returns what `run_rank` returns."""
    gate = TurnGate(work.orders[place.rank], report, rank=place.rank, count_wire=work.count_wire)
    store = FileStore(work.store, place.world_size)
    return run_rank(work.assignment, place, store=store, progress=lambda _: None, gate=gate).to_json()
