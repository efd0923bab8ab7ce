"""The contestants of `bench overlap`: the ranks of all of them are alive, and one contestant at a time trains.

So start-up is paid once, all contestants find the machine in the same state, and a crash affects one contestant only.
"""

import multiprocessing as mp
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from syncline.bench.overlap.rank import Work, run_in_turns
from syncline.bench.overlap.rows import Entry
from syncline.bench.ranks import Progress
from syncline.cluster.ranks import Place, run_ranks
from syncline.errors import RankFailure, UsageError
from syncline.trace.record.cpu_time import available_cores
from syncline.train.rank.record import RankRecord
from syncline.train.rank.worker import Assignment, RunSpec

_ENDLESS = 10**9
_START_S = 900.0


@dataclass
class Contestant:
    """One strategy with its own processes, and what is known of it."""

    entry: Entry
    workers: int
    folder: Path
    orders: list[Connection]
    thread: threading.Thread
    warm_up_steps: int = 0
    records: list[RankRecord] | None = None
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Reports of its ranks since the last order."""


class Contest:
    """The contestants from start to end; leaving `with` ends all that still run."""

    def __init__(self, *, patience_s: float, progress: Progress) -> None:
        self.contestants: list[Contestant] = []
        self._patience, self._progress = patience_s, progress
        # Messages: contestant, rank, content.
        self._inbox: queue.Queue[tuple[int, int, Any]] = queue.Queue()

    def __enter__(self) -> "Contest":
        return self

    def __exit__(self, *_: object) -> None:
        """End all ranks by closing their pipes."""
        for contestant in self.contestants:
            self._close_pipes(contestant)
        for contestant in self.contestants:
            contestant.thread.join()

    def start(self, run: RunSpec, places: Sequence[Place], *, folder: Path, count_wire: bool) -> None:
        """Start a contestant's ranks; `ready` waits for them."""
        pipes = [mp.get_context("forkserver").Pipe(duplex=False) for _ in places]
        # Turns only: no evaluation, no checkpoints, and steps until the order to end.
        train = replace(run.train, steps=_ENDLESS, epochs=1, test_samples=0, checkpoint_every=0)
        assignment = Assignment(
            run=replace(run, train=train),
            folder=folder,
            count_network=False,
            cores=available_cores(),
            launched_ns=time.perf_counter_ns(),
        )
        work = Work(assignment, str(folder / "rendezvous"), tuple(receiver for receiver, _ in pipes), count_wire)
        thread = threading.Thread(target=self._run, args=(len(self.contestants), work, places, folder), daemon=True)
        orders = [sender for _, sender in pipes]
        self.contestants.append(Contestant(Entry(run.strategy), run.workers, folder, orders, thread))
        thread.start()

    def ready(self) -> None:
        """Return when all ranks are ready for their first step, or have ended."""
        for contestant in self.contestants:
            reports = self._answers(contestant, _START_S)
            contestant.warm_up_steps = reports[0]["warm_up_steps"] if reports else 0

    def turn(self, contestant: Contestant, steps: int, *, expected_s: float = 0.0) -> list[dict[str, Any]]:
        """Let one contestant run `steps` steps; the reports of its ranks in rank order, empty if it has ended."""
        if not self._order(contestant, steps):
            return []
        return self._answers(contestant, self._patience + 20 * expected_s)

    def end(self, contestant: Contestant) -> list[RankRecord]:
        """Order a contestant to end; the records of its ranks, empty if it had ended before."""
        if self._order(contestant, 0):
            self._answers(contestant, self._patience, ended=True)
        return contestant.records or []

    def _order(self, contestant: Contestant, steps: int) -> bool:
        contestant.reports.clear()
        if contestant.entry.error is not None:
            return False
        for pipe in contestant.orders:
            with suppress(OSError):  # it has just died: the reason is in the inbox
                pipe.send(steps)
        return True

    def _answers(self, contestant: Contestant, patience: float, *, ended: bool = False) -> list[dict[str, Any]]:
        deadline = time.monotonic() + patience
        while contestant.entry.error is None:
            if contestant.records is not None if ended else len(contestant.reports) == contestant.workers:
                return [contestant.reports[rank] for rank in sorted(contestant.reports)]
            try:
                self._keep(*self._inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                self._crashed(contestant, 0, f"no report from its ranks for {patience:.0f} s")
                self._close_pipes(contestant)
        return []

    def _keep(self, number: int, rank: int, content: Any) -> None:
        """Keep a message. Contestants whose turn it is not can also report: that they have ended."""
        contestant = self.contestants[number]
        if isinstance(content, UsageError):
            raise content
        if isinstance(content, RankFailure):
            self._crashed(contestant, content.rank, content.summary, content.traceback)
        elif isinstance(content, BaseException):
            self._crashed(contestant, 0, f"{type(content).__name__}: {content}")
        elif isinstance(content, list):
            contestant.records = [RankRecord.from_json(record) for record in content]
        else:
            contestant.reports[rank] = content

    def _crashed(self, contestant: Contestant, rank: int, summary: str, traceback: str = "") -> None:
        """Keep and show why a contestant ended; only the first reason counts."""
        entry = contestant.entry
        if entry.error is None:
            entry.error = {"rank": rank, "summary": summary, "traceback": traceback}
            self._progress(f"{entry.strategy} crashed on rank {rank}: {summary}")

    def _run(self, number: int, work: Work, places: Sequence[Place], folder: Path) -> None:
        """Run the ranks of a contestant from start to end, in a thread of their own."""
        try:
            done: Any = run_ranks(
                run_in_turns,
                places,
                work,
                logs=folder,
                on_message=lambda rank, content: self._inbox.put((number, rank, content)),
            )
        except BaseException as error:
            done = error
        finally:
            Path(work.store).unlink(missing_ok=True)
            for receiver in work.orders:
                receiver.close()
        self._inbox.put((number, 0, done))

    @staticmethod
    def _close_pipes(contestant: Contestant) -> None:
        for pipe in contestant.orders:
            pipe.close()
