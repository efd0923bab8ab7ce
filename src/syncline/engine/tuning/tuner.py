"""Tuning while the job runs: profile a few steps, probe network and codecs, plan, and plan again after drift.

Without `compress="auto"` the codecs stay and only the launch order is tuned: the best order depends on how compute
compares with the network, which is not known beforehand. If the host cannot feed a GPU so many launches, there will be
fewer.

Every decision follows from numbers that all ranks have gathered, so all ranks take it at the same step.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.engine.protocols import TunableEngine
from syncline.engine.tuning.choose import PlanChooser
from syncline.engine.tuning.drift import WINDOW, Cause, Drift
from syncline.engine.tuning.executor_trial import ExecutorTrial, reducer_plans
from syncline.engine.tuning.measure_costs import dense_link, mean_over_ranks, measure_costs, measure_link
from syncline.engine.tuning.probe_link import dense_seconds
from syncline.engine.tuning.profile import Profile
from syncline.plan.check import REDUCER_CODECS
from syncline.plan.costs import Costs
from syncline.plan.planner import ALWAYS, Choice
from syncline.plan.unit import Shape

WARM_UP, PROFILED = 2, 4
"""Steps before the profile, and steps of it."""
REPLAN = "replan"
"""Name of the span in which a plan is found and put to use."""


class Tuner:
    """Tunes the plan of a running job; with `allowed=None` the codecs stay and only the launches change."""

    def __init__(self, engine: TunableEngine, allowed: Sequence[str] | None) -> None:
        self._engine, self.allowed = engine, None if allowed is None else list(allowed)
        self._chooser = PlanChooser(engine, self.allowed)
        self._trained: list[bool] = []
        """By parameter: it has trained in a backward pass since the last check, or since the profile began."""
        self.planned: list[bool] = []
        """By parameter: it trained when the plan was made, so the plan counts its cost."""
        self.choice: Choice | None = None
        self.costs: Costs | None = None
        self.planned_at: list[int] = []
        self._step_times: deque[float] = deque(maxlen=WINDOW)
        self._drift = Drift()
        self._pending_mean: tuple[Any, Tensor] | None = None
        """An all-reduce of the step times, and its tensor."""
        self._last_step_at = 0.0
        self._trial: ExecutorTrial | None = None
        """The trial of executors that runs now."""
        self._profile: Profile | None = None
        """The profile that is being taken, or from which the next plan will be made."""
        self._steps = 0
        """Since attach: a resumed job is measured again."""
        self.seconds = 0.0
        """What profiles have cost so far: probes, planning, and how much longer profiled steps took than others."""

    def backward_begins(self, active: Sequence[bool]) -> None:
        """A backward pass has begun in which these parameters train; the same on all ranks."""
        before = self._trained or [False] * len(active)
        self._trained = [a or b for a, b in zip(active, before, strict=True)]

    @property
    def shapes(self) -> list[Shape]:
        """The parameters that the plan was made for; frozen ones cost nothing."""
        return [shape for shape, live in zip(self._engine.shapes, self.planned, strict=True) if live]

    def after_optimizer_step(self, *, first: bool) -> None:
        """An optimizer has stepped; `first`: no other one has since the backward pass. The same on all ranks."""
        if self._profile is not None and self._profile.count >= PROFILED:
            with self._engine.on_device():
                self._plan_after_all_optimizers(self._profile)
        elif first:
            self._after_step()

    def _after_step(self) -> None:
        engine = self._engine
        now = time.perf_counter()
        if self._last_step_at:
            self._step_times.append(now - self._last_step_at)
            if self._profile is not None and len(self._step_times) > 1:
                self.seconds += max(0.0, self._step_times[-1] - self._step_times[0])
        self._last_step_at = now
        self._steps += 1
        with engine.on_device():
            if self._profile is not None:
                self._continue_profile(self._profile)
            elif self._trial is not None:
                self._continue_trial(self._trial)
            elif self.choice is None and self._steps == WARM_UP:
                self._start_profile()
            elif self.choice is not None and engine.plan.executor != self.choice.plan.executor:
                self._return_to_overlap(self.choice)
            elif self._pending_mean is not None:
                self._check_drift(*self._pending_mean)
            elif self.choice is not None and (engine.step - self.planned_at[-1]) % WINDOW == 0:
                self._end_window()

    def _return_to_overlap(self, choice: Choice) -> None:
        """The loop has turned out to be unsuitable for torch's reducer: use the best plan without it."""
        engine = self._engine
        engine.wait()
        if not engine.owes_a_step():
            self.choice = replace(choice, plan=self._chooser.overlap)
            with engine.communicating("replan"):
                engine.replan(self._chooser.overlap)

    def _end_window(self) -> None:
        seen, self._trained = self._trained, []
        if seen and seen != self.planned and not self._engine.owes_a_step():
            self._start_profile()  # parameters were frozen or unfrozen
        elif len(self._step_times) >= WINDOW // 2:
            # The result is read one step later, so that nobody waits for it.
            mine = torch.tensor([statistics.median(self._step_times)], dtype=torch.float64)
            self._pending_mean = dist.all_reduce(mine, group=self._engine.groups.control, async_op=True), mine

    def _start_profile(self) -> None:
        """Time the next steps without overlap, and plan from them."""
        self._engine.wait()
        self._trial = None
        self._trained = []
        self._profile = Profile(self._engine.device, self._engine.slots)
        self._engine.profile(self._profile)
        self._continue_profile(self._profile)

    def _continue_profile(self, profile: Profile) -> None:
        engine = self._engine
        engine.wait()
        tickets = profile.next_step()
        if profile.count >= PROFILED:
            engine.profile(None)
            self._plan_after_all_optimizers(profile)
        elif not engine.compiled:
            engine.observe_touches(tickets)

    def _plan_after_all_optimizers(self, profile: Profile) -> None:
        """Plan, unless an optimizer has still to step: a new plan would lose the codec states that it commits."""
        engine = self._engine
        engine.wait()
        if engine.owes_a_step():
            return
        self._profile = None
        begin = time.perf_counter()
        with engine.communicating("the measurements of auto"):
            self.planned, self._trained = self._trained, []
            self._plan(measure_costs(engine, profile, self.allowed, self.shapes))
        self.seconds += time.perf_counter() - begin

    def _plan(self, costs: Costs) -> None:
        engine = self._engine
        begin, before = engine.recorder.mark("update"), self._chooser.overlap.hash if self.planned_at else ""
        self.costs = costs
        self.choice = self._chooser.choose(costs, self.shapes)
        if self.allowed is not None:
            engine.say(f"step {engine.step}: {self.choice.why}")
        engine.groups.fit(costs.link.bytes_per_s)
        engine.replan(self.choice.plan)
        engine.recorder.add("update", REPLAN, begin, engine.recorder.mark("update"), unit=self.choice.plan.hash)
        self.planned_at.append(engine.step)
        self._step_times.clear()
        self._last_step_at = 0.0
        (network,) = mean_over_ranks(engine, [self._dense_seconds()])
        self._drift.planned(network, same=self.choice.plan.hash == before)
        self._start_trial(self.choice, costs)

    def _start_trial(self, choice: Choice, costs: Costs) -> None:
        """Compare the plan with torch's reducer, if that may be faster."""
        engine = self._engine
        used = {unit.codec for unit in choice.plan.units}
        codecs = ALWAYS if self.allowed is not None and not engine.fell_back else tuple(used) if len(used) == 1 else ()
        if not engine.reducer_suits or not set(codecs) <= set(REDUCER_CODECS):
            return
        plans = reducer_plans(choice.plan, choice.step, engine.shapes, self.shapes, costs, codecs)
        if plans:
            self._trial = ExecutorTrial(plans, choice.plan, choice.step, engine.device)
            engine.replan(self._trial.current)

    def _continue_trial(self, trial: ExecutorTrial) -> None:
        engine = self._engine
        mine = trial.after_step()
        if mine is None:
            return
        engine.wait()
        if engine.owes_a_step():
            return
        with engine.communicating("the trial of executors"):
            if trial.add(mean_over_ranks(engine, [mine])[0]) and engine.reducer_suits:
                engine.replan(trial.current)
            else:
                self._end_trial(trial)

    def _end_trial(self, trial: ExecutorTrial) -> None:
        """Stay with the fastest plan."""
        engine, self._trial = self._engine, None
        self._step_times.clear()
        self._last_step_at = 0.0
        assert self.choice is not None
        if engine.reducer_suits:
            plan, why = trial.fastest()
            self.choice = replace(self.choice, plan=plan, why=f"{self.choice.why}; {why}")
            if plan.executor == "reducer" and self.allowed is not None:
                engine.say(f"step {engine.step}: {why}")
        engine.replan(self.choice.plan)

    def _check_drift(self, work: Any, total: Tensor) -> None:
        self._pending_mean = None
        engine = self._engine
        with engine.communicating("the step times"):
            work.wait()
        if not self._drift.add_window(float(total) / engine.world):
            return
        assert self.costs is not None
        with engine.communicating("the measurements of auto"):
            cause = self._probe()
            if cause is not None and engine.owes_a_step():
                self._drift.postpone()  # a new plan would lose the codec states that another optimizer commits
            elif cause == "link":
                self._plan(replace(self.costs, link=measure_link(engine)))
            elif cause == "compute":
                self._start_profile()

    def _probe(self) -> Cause | None:
        """What has drifted. Nothing else of this job is in flight; waiting for that is a part of the probe's cost."""
        engine = self._engine
        begin, mark = time.perf_counter(), engine.recorder.mark("update")
        engine.wait()
        network, cost = mean_over_ranks(engine, [self._dense_seconds(), time.perf_counter() - begin])
        engine.recorder.add("update", "probe", mark, engine.recorder.mark("update"))
        self._last_step_at = 0.0  # the probe is not a part of a step
        return self._drift.add_probe(network, cost=cost)

    def _dense_seconds(self) -> float:
        """Seconds of a dense exchange of all gradients, as this rank measures the network now."""
        engine = self._engine
        return dense_seconds(dense_link(engine), engine.device, sum(shape.nbytes for shape in engine.shapes))
