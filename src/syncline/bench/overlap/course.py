"""The course of `bench overlap`: every contestant warms up, then they take turns, round after round."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from syncline.bench.overlap.contestants import Contest, Contestant
from syncline.bench.overlap.rows import Entry, common_steps, kind_of, pictured, rows, steady_ms, turn_steps
from syncline.bench.overlap.timeline import window
from syncline.errors import UsageError
from syncline.stats import median
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.train.session.assemble import spans_of

Progress = Callable[[str], None]
LEAD = 3
"""Steps at the beginning of a turn that do not count."""


@dataclass(frozen=True)
class Turns:
    """How often and how long."""

    rounds: int = 5
    seconds: float = 4.0
    """About so long counts a turn."""
    steps: int = 20
    """No more steps than this count in a turn; no fewer than three."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.steps < 3:
            raise UsageError(f"--rounds {self.rounds} --steps {self.steps}: at least 1, and at least 3")
        if not 0 < self.seconds < 1e6:
            raise UsageError(f"--seconds {self.seconds:g}: a turn takes a positive number of seconds")


class Course:
    """The contest from warm-up to end, filing what it sees in `result`."""

    def __init__(
        self, turns: Turns, contest: Contest, result: dict[str, Any], *, save: Callable[[], None], progress: Progress
    ) -> None:
        self.turns, self.contest, self.result = turns, contest, result
        self.save, self.progress = save, progress
        self.entries = [Entry(contestant.strategy) for contestant in contest.contestants]
        self.zero = time.perf_counter_ns()

    def run(self) -> None:
        """Warm-up, rounds, end."""
        pairs = list(zip(self.contest.contestants, self.entries, strict=True))
        for contestant, entry in pairs:
            self._warm_up(contestant, entry)
        self._file()
        for number in range(1, self.turns.rounds + 1):
            # Every other round goes backwards: a machine that grows slower meets all alike.
            for contestant, entry in pairs if number % 2 else reversed(pairs):
                self._count(contestant, entry, number)
                self._file()
            self.result["rounds_done"] = number
            self.save()
        for contestant, entry in pairs:
            records = self.contest.end(contestant)
            self._out(contestant, entry)
            if records:
                metadata = {"strategy": contestant.strategy, "world_size": contestant.workers}
                write_chrome_trace(spans_of(records), contestant.folder / "trace.json.gz", metadata=metadata)
        self._file()

    def _warm_up(self, contestant: Contestant, entry: Entry) -> None:
        """Until nothing settles any more: DDP's buckets, PowerSGD's dense steps, the engine's tuning."""
        turn = self._take(contestant, entry, max(2, contestant.settled_steps), expected_s=0.0)
        if turn is not None:
            steps = steady_ms(turn["steps"], lead=0)
            entry.warm_up = self._times(turn) | {"steps": len(steps), "step_ms": steps}
            self.progress(f"warm-up, {entry.strategy}: {len(steps)} steps, the last {steps[-1]:.1f} ms")

    def _count(self, contestant: Contestant, entry: Entry, number: int) -> None:
        if entry.warm_up is None or entry.error is not None:
            return
        step_s = median(entry.turns[-1]["step_ms"] if entry.turns else entry.warm_up["step_ms"][-2:]) / 1e3
        counted = turn_steps(step_s, seconds=self.turns.seconds, most=self.turns.steps)
        # The engine's first steps find the network idle; what they leave to later ones grows for some steps.
        lead = LEAD if counted > 3 or kind_of(entry.strategy) == "ours" else 1
        ran = lead + counted + 1
        turn = self._take(contestant, entry, ran, expected_s=step_s * ran)
        if turn is None:
            return
        steps = steady_ms(turn["steps"], lead=lead)
        made = {"round": number, "steps": ran, "lead": lead, "step_ms": steps}
        entry.turns.append({**made, "wire_bytes": turn["wire_bytes"], **self._times(turn)})
        self.result["timelines"][entry.strategy] = window(turn["steps"], turn["spans"])
        text = f"{sum(steps) / len(steps):.1f} ms a step, of {counted}"
        self.progress(f"round {number} of {self.turns.rounds}, {entry.strategy}: {text}")

    def _take(self, contestant: Contestant, entry: Entry, steps: int, *, expected_s: float) -> dict[str, Any] | None:
        """A turn as rank 0 saw it, with the mean loss and the busiest link of all ranks."""
        told = self.contest.turn(contestant, steps, expected_s=expected_s)
        self._out(contestant, entry)
        if not told:
            return None
        entry.losses += [sum(values) / len(values) for values in zip(*(t["losses"] for t in told), strict=True)]
        entry.plans = told[0]["plans"]
        wire = [max(t["wire"]["sent"], t["wire"]["received"]) for t in told if t["wire"] is not None]
        spread = {"began": min(t["began"] for t in told), "ended": max(t["ended"] for t in told)}
        return told[0] | spread | {"wire_bytes": max(wire, default=None)}

    def _out(self, contestant: Contestant, entry: Entry) -> None:
        if contestant.crash is not None and entry.error is None:
            crash = contestant.crash
            entry.error = {"rank": crash.rank, "summary": crash.summary, "traceback": crash.traceback}
            self.progress(f"{entry.strategy} crashed on rank {crash.rank}: {crash.summary}")

    def _times(self, turn: dict[str, Any]) -> dict[str, float]:
        """Of a turn, in ms since the contest began."""
        return {key: (turn[key] - self.zero) / 1e6 for key in ("began", "ended")}

    def _file(self) -> None:
        rate = self.result["link"]["measured_bits_per_s"]
        self.result["rows"] = rows(self.entries, bytes_per_s=rate / 8 if rate else None)
        self.result["loss_step"] = common_steps(self.entries)
        self.result["pictured"] = [name for name in pictured(self.result["rows"]) if name]
