"""Turns on a rank's side: training stands still between steps until the coordinator gives the next turn.

Orders come through a pipe: a number of steps, 0 to end. When its other side closes, which also a coordinator that was
killed does, the rank ends at once, whatever it is doing.
"""

import os
import queue
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from syncline._compat import FileStore
from syncline.cluster.ranks import Place, Report
from syncline.trace.span import STEP
from syncline.train.rank.loop import Loop, Outcome
from syncline.train.rank.wire_bytes import Counters, read_counters
from syncline.train.rank.worker import Assignment, run_rank
from syncline.train.strategies.syncline import plan_facts

_SHOWN = 4
"""Steps at a turn's end whose spans rank 0 sends along, for the picture."""


@dataclass(frozen=True)
class Work:
    """What the ranks of one contestant are started with."""

    assignment: Assignment
    store: str
    orders: tuple[Connection, ...]
    """A rank's end of its pipe, by rank."""
    count_wire: bool


class TurnGate:
    """Lets the loop run so many steps as were ordered, and reports what each turn was like."""

    def __init__(self, orders: Connection, report: Report, *, rank: int, count_wire: bool) -> None:
        self._report, self._rank, self._count_wire = report, rank, count_wire
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._until = 0
        self._began: tuple[int, int, Counters | None] | None = None
        threading.Thread(target=self._listen, args=(orders,), daemon=True).start()

    def due(self, step: int) -> bool:
        """Whether the ordered steps are done."""
        return step >= self._until

    def wait(self, loop: Loop, outcome: Outcome) -> bool:
        """Report the turn that has ended (at first: that this rank is ready) and wait for the next."""
        step = len(outcome.losses)
        if self._began is None:
            settled = max(synchroniser.settled_steps for synchroniser in loop.synchronisers)
            self._report({"kind": "ready", "settled_steps": settled})
        else:
            self._report({"kind": "turn", **self._turn(loop, outcome, *self._began)})
        steps = self._orders.get()
        self._until = step + steps
        self._began = (step, time.perf_counter_ns(), self._reading())
        return steps > 0

    def _turn(self, loop: Loop, outcome: Outcome, first: int, began: int, before: Counters | None) -> dict[str, Any]:
        """Plain numbers of one turn. Times are of the host's monotonic clock, which all ranks here share."""
        ended, count = time.perf_counter_ns(), len(outcome.losses) - first
        now = self._reading()
        turn: dict[str, Any] = {
            "first": first,
            "began": began,
            "ended": ended,
            "losses": outcome.losses[first:],
            "wire": None,
        }
        if now is not None and before is not None:
            moved = now.since(before)
            turn["wire"] = asdict(Counters(round(moved.sent / count), round(moved.received / count)))
        if self._rank == 0:
            spans = loop.recorder.spans(first)
            shown = first + count - _SHOWN
            turn["steps"] = [[s.start, s.end] for s in spans if s.lane == STEP]
            # On a GPU data is read ahead, by the host's clock: beside the device's spans it would show what is not.
            left_out = {"data"} if loop.device.type == "cuda" else set()
            seen = [s for s in spans if s.step >= shown and s.lane not in left_out]
            turn["spans"] = [[s.lane, s.name, s.unit, s.step, s.start, s.end] for s in seen]
            turn["plans"] = plan_facts(loop.synchronisers)
        return turn

    def _reading(self) -> Counters | None:
        return read_counters() if self._count_wire else None

    def _listen(self, orders: Connection) -> None:
        """Take orders in a thread of its own, so that a rank in the middle of a step hears that all is over."""
        steps = -1
        while steps:
            try:
                steps = int(orders.recv())
            except (EOFError, OSError):
                os._exit(1)
            self._orders.put(steps)


def run_in_turns(place: Place, work: Work, report: Report) -> dict[str, Any]:
    """A rank's life, for `launch`: what `run_rank` returns, once it was told to end."""
    gate = TurnGate(work.orders[place.rank], report, rank=place.rank, count_wire=work.count_wire)
    return run_rank(
        work.assignment,
        rank=place.rank,
        local_rank=place.local_rank,
        node=place.node,
        store=FileStore(work.store, place.world_size),
        progress=lambda _: None,
        gate=gate,
    )
