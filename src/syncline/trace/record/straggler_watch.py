"""`SYNCLINE_WATCH=1`: a thread that names the straggler in the log while the job runs.

Each rank puts what it recorded since the last time into the store: when it joined exchanges, and how long its lanes
were. Rank 0 compares the ranks. The loop never waits for this.
"""

import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

from syncline._compat.groups import Store
from syncline.trace.analysis.straggler_window import LEAST_STEPS, RankSteps, Straggler, find_straggler
from syncline.trace.merge.clocks import host_id, node_name
from syncline.trace.record.recorder import Recorder
from syncline.trace.span import STEP, Span

WATCH = "SYNCLINE_WATCH"
PERIOD_S = 10.0
"""Seconds between two comparisons."""
REPEAT_S = 60.0
"""Seconds after which the same straggler is named again."""
_JOIN_S = 2.0
_MOST_STEPS, _MOST_EXCHANGES = 16, 4
"""Recorded steps that are compared at a time, the last ones, and exchanges of each: bounds the work of rank 0."""
_MOST_RANKS = 32
"""With more ranks, comparisons are as much rarer."""
_FIRST_STEP = 2  # earlier ones are start-up

_log = logging.getLogger("syncline")


def watch_requested() -> bool:
    """Whether the variable asks for the watch; any value but 0 and nothing does."""
    return os.environ.get(WATCH, "") not in ("", "0")


class StragglerWatch:
    """The thread of one rank. On rank 0 it logs a line when ranks are late, and when they no longer are."""

    def __init__(self, store: Store, recorder: Recorder, *, rank: int, world: int) -> None:
        self._store, self._recorder, self._rank, self._world = store, recorder, rank, world
        self._host, self._node = host_id(), node_name()
        self._next_step = _FIRST_STEP
        self._known: dict[int, RankSteps] = {}
        self._found: tuple[int, ...] = ()
        self._named: tuple[int, ...] = ()
        self._named_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncline-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop using the recorder and the store."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closed.wait(PERIOD_S * max(1.0, self._world / _MOST_RANKS)):
                self.compare_now()
        except (RuntimeError, ValueError, OSError) as error:
            if not self._closed.is_set():  # the store is gone: so is the job, as a rule
                _log.warning("syncline: watch: ended, because the store does not answer: %s", str(error)[:200])

    def compare_now(self) -> None:
        """Send what is new; on rank 0, compare the ranks and log what there is to say."""
        self._publish()
        if self._rank == 0:
            self._compare()

    def _publish(self) -> None:
        """Send the steps that have ended since the last time; the current one and the one before may be incomplete."""
        end = self._recorder.step - 1
        spans = [span for span in self._recorder.spans(self._next_step) if self._next_step <= span.step < end]
        ended = sorted({span.step for span in spans if span.lane == STEP})[-_MOST_STEPS:]
        if not ended:
            return
        self._next_step = end
        spans = _without_most_exchanges([span for span in spans if span.step >= ended[0]])
        mine = RankSteps.of(spans, rank=self._rank, host=self._host, node=self._node)
        if self._rank == 0:
            self._add(mine)
        else:
            packed: Any = zlib.compress(json.dumps(mine.as_json()).encode(), 1)
            self._store.set(f"watch/{self._rank}", packed)

    def _compare(self) -> None:
        """Rank 0: take what the others have sent, and say who is late."""
        for rank in range(1, self._world):
            if self._store.check([f"watch/{rank}"]):
                self._add(RankSteps.from_json(json.loads(zlib.decompress(self._store.get(f"watch/{rank}")))))
        if len(self._known) < self._world:
            return
        common = set.intersection(*(set(one.lanes) for one in self._known.values()))
        if len(common) < LEAST_STEPS:
            return
        self._say(find_straggler(list(self._known.values())))
        for one in self._known.values():
            _keep_steps(one, after=max(common))

    def _add(self, more: RankSteps) -> None:
        """Keep the newest steps of a rank that were not compared yet."""
        known = self._known.setdefault(more.rank, more)
        if known is more:
            return
        fresh = set(more.lanes) - set(known.lanes)
        known.joins += [span for span in more.joins if span.step in fresh]
        known.lanes |= {step: more.lanes[step] for step in fresh}
        _keep_steps(known, after=max(sorted(known.lanes)[: -2 * _MOST_STEPS], default=-1))

    def _say(self, found: Straggler | None) -> None:
        """Log what two comparisons in a row have shown."""
        now, ranks = time.monotonic(), () if found is None else found.ranks
        twice, self._found = ranks == self._found, ranks
        if not twice or (ranks == self._named and now - self._named_at < REPEAT_S):
            return
        if found is not None:
            _log.warning("syncline: watch: %s", found.sentence)
        elif self._named:
            _log.warning("syncline: watch: no rank is late any more")
        self._named, self._named_at = ranks, now


def _without_most_exchanges(spans: Sequence[Span]) -> list[Span]:
    """The spans with a few exchanges of each step: those whose names are first and last, the same ones on all ranks."""
    names = sorted({(span.name, span.unit, span.group) for span in spans if span.lane == "exchange"})
    half = _MOST_EXCHANGES // 2
    kept = {*names[:half], *names[-half:]}
    return [span for span in spans if span.lane != "exchange" or (span.name, span.unit, span.group) in kept]


def _keep_steps(one: RankSteps, *, after: int) -> None:
    one.joins = [span for span in one.joins if span.step > after]
    one.lanes = {step: row for step, row in one.lanes.items() if step > after}
