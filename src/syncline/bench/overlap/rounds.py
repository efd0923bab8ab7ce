"""Rounds of `bench overlap`: every contestant warms up, then they take turns, round after round."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from syncline.bench.overlap.ablation import label_rows
from syncline.bench.overlap.contestants import Contest, Contestant
from syncline.bench.overlap.rows import common_steps, kind_of, last_two_steps, pictured, rows, steady_ms, turn_steps
from syncline.bench.ranks import Progress
from syncline.errors import UsageError
from syncline.stats import median
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.merge.merge_ranks import merge

LEAD = 3
"""Steps at the start of a turn that do not count."""
_MOST = 1_000_000


@dataclass(frozen=True)
class Turns:
    """Number and length of the turns."""

    rounds: int = 5
    seconds: float = 4.0
    """Approximate length of a turn."""
    steps: int = 20
    """Maximum number of steps that count in a turn; the minimum is three."""

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= _MOST or not 3 <= self.steps <= _MOST:
            raise UsageError(
                f"--rounds {self.rounds} --steps {self.steps}: use at least 1 round and 3 steps, and at most {_MOST}"
            )
        if not 0 < self.seconds < 1e6:
            raise UsageError(f"--seconds {self.seconds:g}: the seconds of a turn must be positive")


class Rounds:
    """The contest from warm-up to end; keeps `result` up to date."""

    def __init__(
        self, turns: Turns, contest: Contest, result: dict[str, Any], *, save: Callable[[], None], progress: Progress
    ) -> None:
        self.turns, self.contest, self.result = turns, contest, result
        self.save, self.progress = save, progress
        self.zero = time.perf_counter_ns()

    def run(self) -> None:
        """Warm up, run all rounds, end the contestants and write their traces."""
        contestants = self.contest.contestants
        for contestant in contestants:
            self._warm_up(contestant)
        self._update()
        for number in range(1, self.turns.rounds + 1):
            # Every other round goes backwards, so that a machine that gets slower affects all alike.
            for contestant in contestants if number % 2 else reversed(contestants):
                self._count(contestant, number)
                self._update()
            self.result["rounds_done"] = number
            self.save()
        for contestant in contestants:
            if records := self.contest.end(contestant):
                metadata = {"strategy": contestant.entry.strategy, "world_size": contestant.workers}
                trace = replace(merge([record.part for record in records]), metadata=metadata)
                write_chrome_trace(trace, contestant.folder / "trace.json.gz")
        self._update()

    def _warm_up(self, contestant: Contestant) -> None:
        """Run until nothing changes any more: DDP's buckets, PowerSGD's dense steps, the engine's tuning."""
        turn = self._take(contestant, max(2, contestant.warm_up_steps), expected_s=0.0)
        if turn is not None:
            entry, steps = contestant.entry, steady_ms(turn["steps"], lead=0)
            entry.warm_up = self._times(turn) | {"steps": len(steps), "step_ms": steps}
            self.progress(f"warm-up, {entry.strategy}: {len(steps)} steps, the last {steps[-1]:.1f} ms")

    def _count(self, contestant: Contestant, number: int) -> None:
        entry = contestant.entry
        if entry.warm_up is None or entry.error is not None:
            return
        step_s = median(entry.turns[-1]["step_ms"] if entry.turns else entry.warm_up["step_ms"][-2:]) / 1e3
        counted = turn_steps(step_s, seconds=self.turns.seconds, most=self.turns.steps)
        # The first steps of the engine find the network idle; the work left to later steps grows for some steps.
        lead = LEAD if counted > 3 or kind_of(entry.strategy) == "ours" else 1
        ran = lead + counted + 1
        turn = self._take(contestant, ran, expected_s=step_s * ran)
        if turn is None:
            return
        steps = steady_ms(turn["steps"], lead=lead)
        made = {"round": number, "steps": ran, "lead": lead, "step_ms": steps}
        entry.turns.append({**made, "wire_bytes": turn["wire_bytes"], **self._times(turn)})
        self.result["timelines"][entry.strategy] = last_two_steps(turn["steps"], turn["spans"])
        text = f"{sum(steps) / len(steps):.1f} ms per step, mean of {counted}"
        self.progress(f"round {number} of {self.turns.rounds}, {entry.strategy}: {text}")

    def _take(self, contestant: Contestant, steps: int, *, expected_s: float) -> dict[str, Any] | None:
        """A turn as rank 0 reports it, with the mean loss and the busiest link of all ranks."""
        reports, entry = self.contest.turn(contestant, steps, expected_s=expected_s), contestant.entry
        if not reports:
            return None
        entry.losses += [sum(values) / len(values) for values in zip(*(t["losses"] for t in reports), strict=True)]
        entry.plans = reports[0]["plans"]
        entry.memory = max(t["memory"] for t in reports)
        wire = [max(t["wire"]["sent"], t["wire"]["received"]) for t in reports if t["wire"] is not None]
        spread = {"began": min(t["began"] for t in reports), "ended": max(t["ended"] for t in reports)}
        return reports[0] | spread | {"wire_bytes": max(wire, default=None)}

    def _times(self, turn: dict[str, Any]) -> dict[str, float]:
        """Begin and end of a turn, in ms since the contest began."""
        return {key: (turn[key] - self.zero) / 1e6 for key in ("began", "ended")}

    def _update(self) -> None:
        rate, entries = self.result["link"]["measured_bits_per_s"], [one.entry for one in self.contest.contestants]
        self.result["rows"] = rows(entries, bytes_per_s=rate / 8 if rate else None)
        label_rows(self.result, self.result["stages"])
        self.result["loss_step"] = common_steps(entries)
        self.result["pictured"] = [name for name in pictured(self.result["rows"]) if name]
