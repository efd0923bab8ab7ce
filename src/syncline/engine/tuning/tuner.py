"""Tuning while the job runs: start as DDP does, stop if nothing can be gained, else measure, plan and compare.

A job whose codec torch's reducer can send starts with DDP's buckets. A few steps are watched, which costs nothing. They
show how much another plan could gain. Other buckets, and BF16 with `compress="auto"`, are tried in steps of the job.
Network, codecs and layers are measured only if that can be repaid.

Without `compress="auto"` the codecs stay and only the launches are tuned: their best order depends on how compute
compares with the network. If the host cannot feed a GPU so many launches, there will be fewer.

Every decision follows from numbers that all ranks have gathered, so all ranks take it at the same step.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from syncline.engine.protocols import TunableEngine
from syncline.engine.tuning import budget
from syncline.engine.tuning.choose import PlanChooser
from syncline.engine.tuning.codec_guard import CodecChange, CodecGuard
from syncline.engine.tuning.drift import WINDOW
from syncline.engine.tuning.drift_watch import DriftWatch, network_seconds
from syncline.engine.tuning.executor_trial import (
    MOST_SIZES,
    TIMED,
    ExecutorTrial,
    measured,
    other_codecs,
    other_sizes,
    reducer_plans,
)
from syncline.engine.tuning.measure_costs import measure_costs, measure_link
from syncline.engine.tuning.plan_memory import PlanMemory
from syncline.engine.tuning.profiled_steps import ProfiledSteps
from syncline.engine.tuning.race import CLOSE_AT_START, Race, Timed
from syncline.engine.tuning.report import TuningReport
from syncline.engine.tuning.watch import Seen, Watch
from syncline.plan.auto_spec import Auto
from syncline.plan.cache import Remembered
from syncline.plan.costs import Costs
from syncline.plan.errors import Errors
from syncline.plan.planner import ALWAYS, WORTH, Choice
from syncline.plan.table import Plan
from syncline.plan.unit import Shape

WARM_UP, PROFILED = 2, 3
"""Steps before anything is measured, and steps of a profile."""
TUNED = WARM_UP + TIMED + 4 * (TIMED + 1) + PROFILED + (2 + MOST_SIZES) * (TIMED + 1)
"""After this many steps a plan has been found, or its search waits until it pays, in a loop with one optimizer."""
_LARGE = 0.3
"""A network that is waited for during this share of a step needs other codecs, not other buckets."""
REPLAN, GUARD = "replan", "guard"
"""Names of the spans in which a plan is found and put to use, and in which the guard changes codecs."""


class Tuner:
    """Tunes the plan of a running job; with `automatic=None` the codecs stay and only the launches change."""

    def __init__(self, engine: TunableEngine, automatic: Auto | None, *, overlap: Plan, memory: PlanMemory) -> None:
        """`overlap`: the plan for our own executor, before it is tuned; `memory`: plans of earlier runs."""
        self._engine, self.automatic = engine, automatic
        self.allowed = None if automatic is None else list(automatic.codecs)
        self._chooser = PlanChooser(engine, automatic, overlap)
        self._memory = memory
        self._trained: list[bool] = []
        """By parameter: it has trained in a backward pass since the last check, or since the measurements began."""
        self.planned: list[bool] = []
        """By parameter: it trained when the plan was made, so the plan counts its cost."""
        self.choice: Choice | None = None
        self.costs: Costs | None = None
        """What the planner knows; None while no measurement was worth its cost."""
        self.errors: Errors | None = None
        """What the codecs lose on this job's gradients; None while nothing was measured."""
        self.planned_at: list[int] = []
        self._drift = DriftWatch(engine)
        self._trial: ExecutorTrial | None = None
        """The trial of plans that runs now."""
        self._watch: Watch | None = None
        """Watches the steps of the trial's current plan."""
        self._comparison_due = False
        """Whether the trial's current plan was timed, and waits until all optimizers have stepped."""
        self._best: Timed | None = None
        """The fastest plan of torch's reducer, measured on the present job."""
        self._found: Choice | None = None
        """The plan that the trial compares with torch's reducer; None in a trial of the reducer's buckets alone."""
        self._race = Race()
        """The plans that were close in the trial."""
        self._window: float | None = None
        """Seconds of a step in the race's last window, while an optimizer has still to step."""
        self._stays_dense = False
        """Whether the engine has fallen back to dense units, and that plan was taken over."""
        self.guard = None if automatic is None else CodecGuard(engine, automatic)
        """Watches what the codecs lose while the job trains; None if the codecs stay."""
        self._next: Plan | None = None
        """A plan of the guard that waits until all optimizers have stepped."""
        self._profile: ProfiledSteps | None = None
        """The steps that are being profiled, or from which the next plan will be made."""
        self._steps = 0
        """Since attach: a resumed job is measured again."""
        self._gain = self._cost = 0.0
        """Seconds per step that measurements may gain, and what they cost; 0 if there is nothing to gain."""
        self._trained_seconds = 0.0
        """Time trained so far, the same on all ranks."""
        self.report = TuningReport()
        """What tuning has cost, and what it saves in every step."""

    @property
    def seconds(self) -> float:
        """What tuning has cost so far: probes, planning, and how much longer its steps took than others."""
        return self.report.cost

    @property
    def settled(self) -> bool:
        """Whether a plan is in use, and nothing is tried or measured; the same on all ranks."""
        return self.choice is not None and self._trial is None and self._profile is None

    @property
    def confirmed(self) -> bool:
        """Whether the plan is still the fastest after those that were close were timed for longer than in the trial."""
        return self._race.over

    def backward_begins(self, active: Sequence[bool]) -> None:
        """A backward pass has begun in which these parameters train; the same on all ranks."""
        before = self._trained or [False] * len(active)
        self._trained = [a or b for a, b in zip(active, before, strict=True)]

    @property
    def shapes(self) -> list[Shape]:
        """The parameters that the plan was made for; frozen ones cost nothing."""
        return [shape for shape, live in zip(self._engine.shapes, self.planned, strict=True) if live]

    def recall(self) -> None:
        """Before the first step: use the plan of an earlier run of this job, if there is one for this network."""
        begin = time.perf_counter()
        self._recall()
        self.report = replace(self.report, recall=time.perf_counter() - begin)

    def _recall(self) -> None:
        engine = self._engine
        if not self._memory.read(engine):
            return
        network = network_seconds(engine)
        found = self._memory.find(network)
        if found is None or (found.plan.executor == "reducer" and not engine.reducer_suits):
            return
        self.planned = [slot.parameter.requires_grad for slot in engine.slots]
        self.costs, self.errors = found.costs, found.errors
        if found.costs is not None:
            engine.groups.fit(found.costs.link.bytes_per_s)
        if found.plan.executor == "overlap":
            self._chooser.overlap = found.plan
        if found.gain:
            self._best = Timed(found.plan, Seen(found.step), found.errors)
            self._gain, self._cost = found.gain, self._cost_of_measuring()
        self.choice = Choice(found.plan, found.step, found.step, (), found.why)
        begin = engine.recorder.mark("update")
        # Errors depend on where training is: in a new run, lossy codecs wait for a measurement.
        engine.replan(self._guard(found.plan, verified=False))
        self._planned(network, begin)
        self._drift.expect(found.step)  # of another batch size, perhaps
        self.report = TuningReport(before=found.before, after=found.step, remembered=True)
        if self.allowed is not None:
            engine.say(f"step {engine.step}: {found.why} (remembered from an earlier run)")

    @property
    def changes(self) -> list[CodecChange]:
        """Units that got another codec while the job trained, because of their errors."""
        return [] if self.guard is None else self.guard.changes

    def after_optimizer_step(self, *, first: bool) -> None:
        """An optimizer has stepped; `first`: no other one has since the backward pass. The same on all ranks."""
        if first and self.guard is not None:
            with self._engine.on_device():
                self._next = self.guard.after_step() or self._next
        if self._next is not None:
            with self._engine.on_device():
                self._use_guarded(self._next)
        if self._profile is not None and self._profile.complete:
            with self._engine.on_device():
                self._plan_after_all_optimizers(self._profile)
        elif first:
            self._after_step()
        elif self._trial is not None and self._watch is not None and self._comparison_due:
            with self._engine.on_device():
                self._compare(self._trial, self._watch)
        elif self._window is not None:
            with self._engine.on_device():
                self._continue_race(self._window)

    def _after_step(self) -> None:
        engine = self._engine
        took = self._drift.step_ended()
        if took is not None and (self._profile is not None or self._trial is not None):
            self.report = self.report.spent(took - (self.report.before or self._drift.oldest))
        self._steps += 1
        with engine.on_device():
            if self._profile is not None:
                self._continue_profile(self._profile)
            elif engine.fell_back and self.choice is not None and not self._stays_dense:
                self._stay_dense(self.choice)
            elif self._window is not None:
                self._continue_race(self._window)
            elif self._trial is not None and self._watch is not None:
                self._continue_trial(self._trial, self._watch)
            elif self.choice is None and self._steps == WARM_UP:
                self._begin()
            elif self.choice is not None and engine.plan.executor != self.choice.plan.executor:
                self._return_to_overlap(self.choice)
            elif (mean := self._drift.mean()) is not None:
                self._check_drift(mean)
            elif self.choice is not None and (engine.step - self.planned_at[-1]) % WINDOW == 0:
                self._end_window()

    def _begin(self) -> None:
        """Watch the job under torch's reducer, and try other buckets; measure the job at once if it has no reducer."""
        engine = self._engine
        self._best, self._found, self._gain = None, None, 0.0
        if engine.plan.executor != "reducer":
            self._measure_without_reducer()
            return
        self._trained = []
        sizes = partial(other_sizes, shapes=engine.shapes)
        codecs = [partial(other_codecs, shapes=engine.shapes)] if self._may_choose else []
        trial = ExecutorTrial([engine.plan], then=[*codecs, sizes], enough=self._needs_fewer_bytes)
        self._start_trial(trial, skip=0)

    def _begin_again(self) -> None:
        """The job has changed: measure it again, or watch it if that was enough before. Nothing is in flight."""
        self._best = None
        if self.costs is not None:
            self._start_profile()
        else:
            self._begin()

    def _return_to_overlap(self, choice: Choice) -> None:
        """The loop has turned out to be unsuitable for torch's reducer: use the best plan without it."""
        engine = self._engine
        engine.wait()
        if engine.owes_a_step():
            return
        self._end_race()
        self.choice = replace(choice, plan=self._chooser.overlap)
        if self.costs is None:
            self._measure_without_reducer()
        else:
            engine.replan(self._guard(self._chooser.overlap))

    def _stay_dense(self, choice: Choice) -> None:
        """The sentinel has made units dense: no plan that was timed before may take their place."""
        engine = self._engine
        engine.wait()
        if engine.owes_a_step():
            return
        self._stop_guard()
        self._end_race()
        engine.watch_passes(None)
        self._trial = self._watch = self._found = None
        self._comparison_due, self._stays_dense = False, True
        self._chooser.overlap = engine.plan
        self.choice = replace(choice, plan=engine.plan, contender=None, why=f"{choice.why}; units fell back to dense")
        self._drift.codecs_changed()

    def _measure_without_reducer(self) -> None:
        """Measure the job under the plan for our own executor. If the loop has left the reducer, its buckets remain."""
        engine = self._engine
        self._best = self._found = None
        if not engine.reducer_suits and not engine.fell_back:
            engine.replan(self._chooser.overlap)
        self._start_profile()

    @property
    def _may_choose(self) -> bool:
        """Whether the planner may choose codecs."""
        return self.allowed is not None and not self._engine.fell_back

    def _needs_fewer_bytes(self, first: Timed) -> bool:
        """Whether the network takes so much of a step that no buckets help, and measuring codecs pays at once."""
        gain = first.seen.gain(smaller=self._may_choose)
        large = self._may_choose and gain > _LARGE * first.step
        return large and not budget.pays_after(self._cost_of_measuring(), gain=gain, step=first.step)

    # -- trials: steps of the job under other plans

    def _start_trial(self, trial: ExecutorTrial, *, skip: int = 1) -> None:
        """Time the trial's plans, each after `skip` steps; at the end of the trial, decide."""
        engine, plan = self._engine, trial.current
        self._stop_guard()
        if plan is None:
            self._trial = self._watch = None
            self._end_trial(trial)
            return
        engine.replan(plan)
        self._trial = trial
        self._watch = Watch(engine.device, [slot.parameter for slot in engine.slots], skip=skip)
        engine.watch_passes(self._watch)

    def _continue_trial(self, trial: ExecutorTrial, watch: Watch) -> None:
        watch.after_step()
        self._comparison_due = trial.due(watch.count) or self._left_reducer(trial)
        if self._comparison_due:
            self._compare(trial, watch)

    def _left_reducer(self, trial: ExecutorTrial) -> bool:
        """Whether the loop has turned out to be unsuitable for torch's reducer while it was tried."""
        return trial.current is not None and trial.current.executor != self._engine.plan.executor

    def _compare(self, trial: ExecutorTrial, watch: Watch) -> None:
        """Judge the trial's current plan, unless an optimizer has still to step."""
        engine = self._engine
        engine.wait()
        if engine.owes_a_step():
            return
        self._comparison_due = False
        with engine.communicating("the trial of executors"):
            if self._left_reducer(trial):
                engine.watch_passes(None)
                self._trial = self._watch = None
                if self._found is None:
                    self._measure_without_reducer()
                else:
                    self._settle(self._fastest_of_ours(trial, self._found))
            elif trial.add(watch.seen(engine), watch.count):
                engine.watch_passes(None)
                if not self.report.before and trial.timed[-1].plan.executor == "reducer":
                    self.report = replace(self.report, before=trial.timed[-1].step)
                self._start_trial(trial)

    def _end_trial(self, trial: ExecutorTrial) -> None:
        """All plans were timed: stay with the fastest, or measure the job if that can find a faster one and pays."""
        best, choice = trial.fastest(), self._found
        if choice is None:
            self._after_reducers(best, trial.race(close_if_short=CLOSE_AT_START))
            return
        choice, ours = self._fastest_of_ours(trial, choice), trial.fastest_of_ours()
        if best is ours:
            reducer = min((one.step for one in trial.timed if one.plan.executor == "reducer"), default=None)
            if reducer is not None:
                why = f"torch's reducer would take {_ms(reducer)}, and this plan takes {_ms(best.step)}"
                choice = replace(choice, why=f"{choice.why}; {why}")
        else:
            other = f"takes {_ms(ours.step)}" if ours else f"is predicted at {_ms(choice.step)}"
            why = f"torch's reducer takes {_ms(best.step)} a step, and a plan that uses the next forward pass {other}"
            choice = replace(choice, plan=measured(best), step=best.step, why=f"{choice.why}; {why}")
            if self.allowed is not None:
                self._engine.say(f"step {self._engine.step}: {why}")
        self.report = replace(self.report, after=best.step)
        self._settle(choice, trial.race())

    def _fastest_of_ours(self, trial: ExecutorTrial, choice: Choice) -> Choice:
        """The choice for our own executor: the planner's, or its contender if that was faster in the trial."""
        best, other = trial.fastest_of_ours(), choice.contender
        choice = replace(choice, contender=None)
        if best is None or other is None or best.plan.hash != other.plan.hash:
            return choice
        self._chooser.overlap = other.plan
        self.report = replace(self.report, after=best.step)
        first = next(one for one in trial.timed if one.plan.hash == choice.plan.hash)  # it ran before its contender
        why = f"{other.why}, and takes {_ms(best.step)} against {_ms(first.step)}"
        if self.allowed is not None:
            self._engine.say(f"step {self._engine.step}: {why}")
        return replace(choice, plan=other.plan, step=other.step, bound=other.bound, why=f"{choice.why}; {why}")

    def _after_reducers(self, best: Timed, race: Race) -> None:
        """Buckets of torch's reducer were timed, and nothing was measured yet."""
        engine = self._engine
        self._best = best
        gain = best.seen.gain(smaller=self._may_choose)
        worth = gain > WORTH * best.step
        self._gain, self._cost = (gain, self._cost_of_measuring()) if worth else (0.0, 0.0)
        if self._wait_to_measure(best.step) <= 0:
            engine.replan(best.plan)
            self._start_profile()
            return
        why = f"torch's reducer takes {_ms(best.step)} a step, and another plan could save at most {_ms(gain)}"
        why += f": not worth {self._cost:.1f} s of measurements yet" if worth else ""
        self.planned, self._trained = self._trained, []
        begin = engine.recorder.mark("update")
        self.choice = Choice(measured(best), best.step, best.step - gain, (), why)
        engine.replan(best.plan)
        self.report = replace(self.report, after=best.step)
        self._planned(network_seconds(engine), begin)
        self._settle(self.choice, race)

    @property
    def wait_to_measure(self) -> float:
        """Seconds of training until codecs and network will be measured; infinite if nothing can be gained."""
        return math.inf if self.choice is None else self._wait_to_measure(self.choice.step)

    def _wait_to_measure(self, step: float) -> float:
        if not self._gain:
            return math.inf
        return budget.pays_after(self._cost, gain=self._gain, step=step) - self._trained_seconds

    def _cost_of_measuring(self) -> float:
        codecs = {*ALWAYS, *(self.allowed or ())} if self._may_choose else {"the plan's"}
        return budget.expected_seconds(
            device=self._engine.device.type,
            tensors=len(self._engine.shapes),
            codecs=len(codecs),
            choose=self._may_choose,
            values=sum(shape.values for shape in self._engine.shapes),
            world=self._engine.world,
        )

    def _settle(self, choice: Choice, race: Race | None = None) -> None:
        """Stay with a plan, until the job drifts or the plan loses the race against others that were close."""
        engine, self.choice, self._found = self._engine, choice, None
        self._end_race()
        self._race = race or self._race
        engine.replan(self._guard(choice.plan))
        self._drift.restart()
        self.report = replace(self.report, steps=self._steps)
        if self.allowed is not None:
            engine.say(f"step {engine.step}: {self.report}")
        plan, step, before = choice.plan, self.report.after, self.report.before
        self._memory.write(
            engine,
            Remembered(plan, step, before, self._drift.network, self._gain, choice.why, self.costs, self.errors),
        )

    def _continue_race(self, step: float) -> bool:
        """A window of steps has taken `step` seconds each; returns whether another plan runs now.

        If an optimizer has still to step, the window is judged after that.
        """
        engine, choice, race = self._engine, self.choice, self._race
        assert choice is not None
        engine.wait()
        self._window = step if engine.owes_a_step() else None
        if self._window is not None:
            return True
        if race.disturbed(step):
            # The job has changed: the next windows count as drift from what was seen before.
            self._drift.expect(race.fastest_window)
            self._end_race()
            return False
        before = race.current
        race.add(step)
        now, ours = race.current, race.fastest(ours=True)
        if race.over and ours is not None:
            self._chooser.overlap = ours.plan
        assert before is not None
        assert now is not None
        if now.plan is before.plan and (not race.over or before is race.first):
            return False
        plan = measured(now) if now.plan.executor == "reducer" else now.plan
        choice = Choice(plan, now.step, choice.bound, (), choice.why)
        if race.over:
            self.report = replace(self.report, after=now.step)
            why = f"over {WINDOW} steps this plan takes {_ms(now.step)}, less than the others that were close"
            self._settle(replace(choice, why=f"{choice.why}; {why}"), race)
        else:
            self.choice = choice
            engine.replan(self._guard(plan))
            self._drift.restart()
        return True

    def _end_race(self) -> None:
        """Stay with the plan that runs."""
        self._race, self._window = Race(), None

    def _use_guarded(self, plan: Plan) -> None:
        """Run a plan of the guard, unless an optimizer has still to step with the one before."""
        engine = self._engine
        engine.wait()
        if engine.owes_a_step():
            return
        self._next = None
        self._end_race()  # what was timed has other codecs now
        begin = engine.recorder.mark("update")
        engine.replan(plan)
        engine.recorder.add("update", GUARD, begin, engine.recorder.mark("update"), unit=plan.hash)
        self._drift.codecs_changed()

    def _guard(self, plan: Plan, *, verified: bool = True) -> Plan:
        """Let the guard watch a plan from now on, if it has lossy codecs; returns the plan to run."""
        if self.guard is None or self.costs is None or self.errors is None:
            return plan
        return self.guard.planned(plan, self.shapes, self.costs, self.errors, verified=verified)

    def _stop_guard(self) -> None:
        """Other plans are tried or measured. What the guard has learnt about errors counts for the next plan."""
        self._next = None
        if self.guard is not None:
            self.errors = self.guard.stop() or self.errors

    # -- measurements, and plans from them

    def _start_profile(self) -> None:
        """Time the next steps without overlap, and plan from them."""
        self._engine.wait()
        self._stop_guard()
        self._trial = self._watch = None
        self._trained = []
        self._profile = ProfiledSteps(self._engine, PROFILED, keep_gradients=self._may_choose)

    def _continue_profile(self, profile: ProfiledSteps) -> None:
        profile.after_step()
        if profile.complete:
            self._plan_after_all_optimizers(profile)

    def _plan_after_all_optimizers(self, profile: ProfiledSteps) -> None:
        """Plan, unless an optimizer has still to step: a new plan would lose the codec states that it commits."""
        engine = self._engine
        engine.wait()
        if engine.owes_a_step():
            return
        self._profile = None
        begin = time.perf_counter()
        with engine.communicating("the measurements of auto"):
            self.planned, self._trained = self._trained, []
            found = profile.measure_errors(self.allowed or ())
            if found is not None:
                self.errors = found if self.errors is None else self.errors.updated(found)
            self._plan(measure_costs(engine, profile.profile, self.allowed, self.shapes))
        self.report = self.report.spent(time.perf_counter() - begin)

    def _plan(self, costs: Costs) -> None:
        engine, best = self._engine, self._best
        begin = engine.recorder.mark("update")
        self._stop_guard()
        self.costs, self._gain = costs, 0.0
        found = self.choice = self._found = self._chooser.choose(costs, self.shapes, self.errors)
        ours = [found.plan] if found.contender is None else [found.plan, found.contender.plan]
        # A contender may gain more than is predicted.
        margin = WORTH if found.contender is None else 0.0

        def if_faster(than: Timed) -> list[Plan]:
            return ours if found.step < than.step * (1 - margin) else []

        if self.allowed is not None:
            engine.say(f"step {engine.step}: {found.why}")
        engine.groups.fit(costs.link.bytes_per_s)
        engine.replan(found.plan if best is None or if_faster(best) else best.plan)
        self.report = replace(self.report, after=found.step)
        self._planned(network_seconds(engine), begin)
        if best is not None:
            # Steps on a slow network are not spent on BF16 under the reducer, unless the plan turns out to be slow.
            others = [lambda fastest: self._buckets_to_try(found, costs, fastest.step)] if self._may_choose else []
            self._start_trial(ExecutorTrial([], timed=[best], then=[if_faster, *others], errors=self.errors))
        elif buckets := self._buckets_to_try(found, costs, found.step):
            self._start_trial(ExecutorTrial(buckets, then=[if_faster], errors=self.errors))
        elif found.contender is not None:
            self._start_trial(ExecutorTrial(ours, errors=self.errors))
        else:
            self._settle(found)

    def _buckets_to_try(self, choice: Choice, costs: Costs, step: float) -> list[Plan]:
        """Plans of torch's reducer to compare with a plan that was found without it and takes `step` seconds."""
        engine = self._engine
        used = {unit.codec for unit in choice.plan.units}
        codecs = ALWAYS if self._may_choose else tuple(used) if len(used) == 1 else ()
        if not engine.reducer_suits or not codecs:
            return []
        return reducer_plans(choice.plan, step, engine.shapes, self.shapes, costs, codecs)

    def _planned(self, network: float, begin: Any) -> None:
        """A plan is in use that was found between `begin` and now; a dense exchange takes `network` seconds."""
        engine = self._engine
        assert self.choice is not None
        found = self.choice.plan.hash
        engine.recorder.add("update", REPLAN, begin, engine.recorder.mark("update"), unit=found)
        self.planned_at.append(engine.step)
        self._drift.planned(found, network)

    # -- drift

    def _end_window(self) -> None:
        seen, self._trained = self._trained, []
        if seen and seen != self.planned and not self._engine.owes_a_step():
            self._engine.wait()
            self._begin_again()  # parameters were frozen or unfrozen
        else:
            self._drift.start_mean()

    def _check_drift(self, step: float) -> None:
        """All ranks have taken `step` seconds in each step of a window, on average."""
        engine = self._engine
        self._trained_seconds += WINDOW * step
        if not self._race.over and self._continue_race(step):
            return
        if self._wait_to_measure(step) <= 0:
            engine.wait()
            if not engine.owes_a_step():
                self._start_profile()
                return
        if not self._drift.add_window(step):
            return
        with engine.communicating("the measurements of auto"):
            cause = self._drift.probe()
            if cause is not None and engine.owes_a_step():
                self._drift.postpone()  # a new plan would lose the codec states that another optimizer commits
            elif cause == "link" and self.costs is not None:
                self._best = None
                self._plan(replace(self.costs, link=measure_link(engine)))
            elif cause is not None:
                self._begin_again()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
