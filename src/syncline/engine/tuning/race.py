"""Race of plans: those that were close in a trial run in turns for windows of steps, and the fastest one stays.

A trial times a few steps of each plan, which may mislead on a machine that other programs use. Steps of a race are
steps of the job, so it costs only what a plan is slower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from syncline.engine.tuning.drift import DRIFT
from syncline.engine.tuning.watch import Seen
from syncline.plan.errors import ROUNDING, Errors
from syncline.plan.table import Plan

ROUNDS, ROUNDS_OF_CODECS = 2, 3
"""Windows of steps that each plan gets; more where plans lose more or less, so that noise does not choose a codec."""
CLOSE = 0.1
"""A plan that took longer in the trial by more than this share, compared with a window of the fastest one, is out."""
CLOSE_AT_START, SHORT = 0.5, 0.1
"""The same for a job's first trial, where steps are shorter than SHORT seconds: a trial times few of them, so they may
be off by more, and a window of them costs little. Not later, since a race delays the detection of drift."""
BEHIND, FAR_BEHIND = 0.05, 0.3
"""A plan that is slower than the fastest one by the first share does not run again; by the second if it loses less."""
LOSSY = 0.02
"""The fastest plan has to be faster by this share, and in every round, than those that lose less (dense against BF16,
BF16 against int4). Of those that it does not beat so clearly, the one that loses least stays."""


@dataclass(frozen=True)
class Timed:
    """A plan and what was seen of its steps."""

    plan: Plan
    seen: Seen
    errors: Errors | None = None
    """What codecs lose on this job's gradients; None if that was not measured."""

    @property
    def step(self) -> float:
        """Seconds of its step."""
        return self.seen.step

    @property
    def lost(self) -> float:
        """What its codecs lose: nothing, a rounding, a measured error, or infinite if that is not known."""
        codecs = {unit.codec for unit in self.plan.units}
        if codecs <= ROUNDING.keys():
            return max(ROUNDING[codec] for codec in codecs)
        return math.inf if self.errors is None else self.errors.total(self.plan.units)


class Race:
    """Plans in turns: `current` runs for a window of steps, then `add` gets its time, until the race is `over`.

    All numbers that it gets are the same on all ranks, and so are its answers.
    """

    def __init__(
        self, best: Timed | None = None, others: Sequence[Timed] = (), *, close_if_short: float = CLOSE
    ) -> None:
        """`best`: the fastest plan of the trial, which runs first. Without others there is no race.

        `close_if_short`: used in place of `CLOSE` if steps are short.
        """
        self._others, self._close_if_short = list(others), close_if_short
        self._windows: list[tuple[Timed, float]] = []
        self._turns = [] if best is None or not others else [best]
        self.first = self.current = best
        """The plan that is to run now; the fastest one when the race is over."""

    @property
    def over(self) -> bool:
        """Whether no plan has to run again."""
        return not self._turns

    @property
    def fastest_window(self) -> float:
        """Seconds of a step in the fastest window so far; 0 before the first one."""
        return min((step for _, step in self._windows), default=0.0)

    def disturbed(self, step: float) -> bool:
        """Whether a window of the current plan shows drift: it is slower than the plan's trial and the best window."""
        assert self.current is not None
        known = self.fastest_window
        return known > 0 and step > (1 + DRIFT) * max(self.current.step, known)

    def add(self, step: float) -> None:
        """The current plan took `step` seconds in each step of a window."""
        runner = self._turns.pop(0)
        self._windows.append((runner, step))
        if self._others:
            others = sorted(self._others, key=lambda one: one.step)
            close = CLOSE if step >= SHORT else self._close_if_short
            runners = [runner, *(one for one in others if one.step <= step * (1 + close))]
            self._others = []
            if len(runners) > 1:
                rounds = ROUNDS if len({one.lost for one in runners}) == 1 else ROUNDS_OF_CODECS
                # There and back, so that a slow change of the machine is the same for all.
                self._turns = [one for turn in range(rounds) for one in (runners if turn % 2 == 0 else runners[::-1])]
                self._turns.pop(0)
        best = self.fastest()
        assert best is not None, "a window has been timed"
        leader = replace(best, seen=Seen(self._typical(best)))
        self._turns = [one for one in self._turns if not self._is_behind(one, leader)]
        if all(one.plan is leader.plan for one in self._turns):
            self._turns = []
        self.current = self._turns[0] if self._turns else leader

    def fastest(self, *, ours: bool = False) -> Timed | None:
        """The plan to stay with, by the windows so far; `ours`: among those for our own executor. None if none ran."""
        ran = {id(one.plan): one for one, _ in self._windows if not ours or one.plan.executor == "overlap"}.values()
        if not ran:
            return None
        first = min(ran, key=self._typical)
        near = [one for one in ran if not self._clearly_beats(first, one)]
        return min(near, key=lambda one: (one.lost, self._typical(one)))

    def _is_behind(self, one: Timed, leader: Timed) -> bool:
        if one.lost > leader.lost and not self._ahead_in_every_round(one, leader):
            return True
        return self._typical(one) > leader.step * (1 + (FAR_BEHIND if one.lost < leader.lost else BEHIND))

    def _times(self, runner: Timed) -> list[float]:
        return [step for one, step in self._windows if one.plan is runner.plan]

    def _typical(self, runner: Timed) -> float:
        """The lower median of a plan's windows, 0 without one: a slow window may be another program's fault."""
        times = sorted(self._times(runner))
        return times[(len(times) - 1) // 2] if times else 0.0

    def _clearly_beats(self, first: Timed, other: Timed) -> bool:
        """Whether the fastest plan stays rather than another one, which may lose less."""
        if first.lost <= other.lost:
            return self._typical(first) < self._typical(other)
        clearly = self._typical(first) < self._typical(other) * (1 - LOSSY)
        return clearly and self._ahead_in_every_round(first, other)

    def _ahead_in_every_round(self, one: Timed, other: Timed) -> bool:
        return all(a < b for a, b in zip(self._times(one), self._times(other), strict=False))
