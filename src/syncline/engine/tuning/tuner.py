"""Tuning while the job runs: profile a few steps, probe link and codecs, plan, and plan again when steps drift.

Without `compress="auto"` the codecs stay as they are and only the launch order is found: the best one depends on how
compute and wire compare, which nobody knows beforehand. A GPU whose host cannot feed it so many launches gets fewer.

Every decision follows from numbers that all ranks have gathered, so all take it at the same step.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline import exchange
from syncline.codecs import Codec
from syncline.engine.inflight import tickets as pending
from syncline.engine.tuning.costs import agreed, dense_link, measured, measured_link
from syncline.engine.tuning.decide import decided
from syncline.engine.tuning.drift import WINDOW, Cause, Drift
from syncline.engine.tuning.probe_link import dense_seconds
from syncline.engine.tuning.profile import Profile
from syncline.errors import UsageError
from syncline.plan.costs import Costs
from syncline.plan.frozen import ordered_as, trained, whole
from syncline.plan.planner import WORTH, Choice, reorder, search
from syncline.plan.predict import built, exchanges_to_weigh, predict
from syncline.plan.quality import NOISE, within
from syncline.plan.table import Plan
from syncline.plan.unit import Shape
from syncline.spec import parse_one, show

if TYPE_CHECKING:
    from syncline.engine.sync import Sync

WARM_UP, PROFILED = 2, 4
REPLAN = "replan"
"""The span in which a plan is found and put to use."""


def allowed_codecs(text: str, *, device: str = "cpu") -> list[str] | None:
    """The lossy codecs of `"auto"` or `"auto(int8, powersgd(rank=4))"`; None if the spec is not auto."""
    if text.strip().partition("(")[0].strip() != "auto":
        return None
    call = parse_one(text)
    if call.kwargs:
        raise UsageError(f"'{text}': auto takes codecs, such as auto(int8, powersgd(rank=4)), or nothing")
    named = [show(arg) if isinstance(arg, tuple) else str(arg) for arg in call.args]
    for codec in named:
        exchange.legal(codec)
    return named or within(NOISE, device=device)


def _by_value(codec: Codec) -> bool:
    """Whether each value, or each matrix, is coded by itself, so that it does not matter what travels beside it."""
    alone = codec.view == "matrix" or codec.definition.name in ("none", "bf16", "fp16")
    return alone and (codec.tail is None or codec.tail.adds)


class Auto:
    """Finds the plan of a running job; with `allowed=None` the codecs stay and only the launch order is found."""

    def __init__(self, sync: "Sync", allowed: Sequence[str] | None) -> None:
        self._sync, self.allowed = sync, None if allowed is None else list(allowed)
        self._trained: list[bool] = []
        """Of each parameter, whether it has trained in a backward pass since the last look, or the profile's start."""
        self.planned: list[bool] = []
        """And when the plan was made: it is of those."""
        self._joined: tuple[str, Plan] | None = None
        """The hash of a plan in which units were joined, and the plan before: its units may come back. On rank 0."""
        self.choice: Choice | None = None
        self.costs: Costs | None = None
        self.planned_at: list[int] = []
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._drift = Drift()
        self._asked: tuple[Any, Tensor] | None = None
        self._last = 0.0
        self._profiled: Profile | None = None
        """A finished profile that no plan was made from yet."""
        self._steps = 0
        """Counted since attach: a resumed job is measured anew."""

    def began(self, active: Sequence[bool]) -> None:
        """A backward pass has begun in which these parameters train; the same on all ranks."""
        self._trained = [a or b for a, b in zip(active, self._trained, strict=True)] if self._trained else list(active)

    @property
    def shapes(self) -> list[Shape]:
        """The parameters that the plan was made for; frozen ones cost nothing."""
        return [shape for shape, live in zip(self._sync.shapes, self.planned, strict=True) if live]

    def stepped(self, *, counted: bool) -> None:
        """An optimizer has stepped, the first of its step if that was counted; all ranks are here at the same one."""
        if self._profiled is not None:
            with self._sync.on_device():
                self._plan_when_all_have_stepped(self._profiled)
        elif counted:
            self._counted()

    def _counted(self) -> None:
        sync = self._sync
        now = time.perf_counter()
        if self._last:
            self._times.append(now - self._last)
        self._last = now
        self._steps += 1
        with sync.on_device():
            if self.choice is None and self._steps == WARM_UP:
                self._profile()
            elif sync._profile is not None:
                self._profiling(sync._profile)
            elif self._asked is not None:
                self._hear(*self._asked)
            elif self.choice is not None and (sync.step - self.planned_at[-1]) % WINDOW == 0:
                self._look()

    def _look(self) -> None:
        seen, self._trained = self._trained, []
        if seen and seen != self.planned and not self._sync._stepper.owes_a_step():
            self._profile()  # parameters were frozen, or set free
        else:
            self._ask()

    def _profile(self) -> None:
        """The next steps are timed without overlap, and planned from."""
        self._sync.wait()
        self._trained = []
        self._sync._profile = profile = Profile(self._sync.device, self._sync.slots)
        self._profiling(profile)

    def _profiling(self, profile: Profile) -> None:
        sync = self._sync
        sync.wait()
        tickets = profile.stepped()
        if profile.count >= PROFILED:
            sync._profile, self._profiled = None, profile
            self._plan_when_all_have_stepped(profile)
        elif not sync._compiled.entered:
            for slot, ticket in zip(sync.slots, tickets, strict=True):
                pending.mark(slot.parameter, ticket)

    def _plan_when_all_have_stepped(self, profile: Profile) -> None:
        """What the last exchange left for an optimizer that is still to step would be lost."""
        sync = self._sync
        sync.wait()
        if sync._stepper.owes_a_step():
            return
        self._profiled = None
        with sync._watched.communicating("the measurements of auto"):
            self.planned, self._trained = self._trained, []
            self._plan(measured(sync, profile, self.allowed, self.shapes))

    def _plan(self, costs: Costs) -> None:
        sync = self._sync
        begin, before = sync.recorder.mark("update"), sync.plan.hash if self.planned_at else ""
        self.costs = costs
        self.choice = decided(sync.groups, lambda: self._found(costs))
        if self.allowed is not None:
            sync.say(f"step {sync.step}: {self.choice.why}")
        sync.groups.fit(costs.link.bytes_per_s)
        sync.replan(self.choice.plan)
        sync.recorder.add("update", REPLAN, begin, sync.recorder.mark("update"), unit=self.choice.plan.hash)
        self.planned_at.append(sync.step)
        self._times.clear()
        self._last = 0.0
        (wire,) = agreed(sync, [self._wire()])
        self._drift.planned(wire, same=self.choice.plan.hash == before)

    def _found(self, costs: Costs) -> Choice:
        sync = self._sync
        shapes = self.shapes
        if self.allowed is not None and not sync._sentinel.fell_back:
            choice = search(shapes, costs, allowed=self.allowed)
            return replace(choice, plan=whole(choice.plan, sync.shapes))
        before = sync.plan
        if self._joined is not None and self._joined[0] == before.hash:
            before = self._joined[1]
        found = reorder(trained(before, shapes), shapes, costs)
        told = predict(found.plan, shapes, costs)
        fewer = self._fewer(before, costs) if told.host >= found.step else None
        if fewer is not None and fewer.step < found.step * (1 - WORTH):
            why = (
                f"{len(found.plan.order)} launches would take the host {told.host * 1e3:.1f} ms a step:"
                f" {len(fewer.plan.order)} larger ones are predicted at {fewer.step * 1e3:.1f} ms"
            )
            sync.say(f"step {sync.step}: {why}")
            kind = fewer.plan.units[0]
            plan = whole(fewer.plan, sync.shapes, codec=kind.codec, exchange=kind.exchange)
            self._joined = plan.hash, before
            return replace(fewer, plan=plan, why=why)
        why = f"launches ordered for a step of {found.step * 1e3:.1f} ms (bound {told.bound * 1e3:.1f} ms)"
        return Choice(ordered_as(before, found.plan), found.step, told.bound, (found,), why)

    def _fewer(self, plan: Plan, costs: Costs) -> Choice | None:
        """The host cannot feed a GPU so many launches: the same codec for all in other groups, where that changes
        nothing of what a codec does to a value."""
        kinds = {(unit.codec, unit.exchange) for unit in plan.units}
        codec, carrier = min(kinds)
        if len(kinds) > 1 or exchanges_to_weigh(codec, costs.world) != (carrier,) or not _by_value(built(codec)):
            return None
        return search(self.shapes, costs, allowed=[codec], always=(), mix=False)

    def _ask(self) -> None:
        """What does a step take now? The ranks' answer is heard a step later: nobody waits for it."""
        if len(self._times) < WINDOW // 2:
            return
        mine = torch.tensor([statistics.median(self._times)], dtype=torch.float64)
        self._asked = dist.all_reduce(mine, group=self._sync.groups.control, async_op=True), mine

    def _hear(self, work: Any, total: Tensor) -> None:
        self._asked = None
        sync = self._sync
        with sync._watched.communicating("the step times"):
            work.wait()
        if not self._drift.look(float(total) / sync.world):
            return
        assert self.costs is not None
        with sync._watched.communicating("the measurements of auto"):
            cause = self._probe()
            if cause is not None and sync._stepper.owes_a_step():
                self._drift.postponed()  # another optimizer has still to step: its states would be lost
            elif cause == "link":
                self._plan(replace(self.costs, link=measured_link(sync)))
            elif cause == "compute":
                self._profile()

    def _probe(self) -> Cause | None:
        """What has drifted. Nothing else of ours is on the wire meanwhile; the wait for that is a part of the cost."""
        sync = self._sync
        begin, mark = time.perf_counter(), sync.recorder.mark("update")
        sync.wait()
        wire, cost = agreed(sync, [self._wire(), time.perf_counter() - begin])
        sync.recorder.add("update", "probe", mark, sync.recorder.mark("update"))
        self._last = 0.0  # no step took this long
        return self._drift.probed(wire, cost=cost)

    def _wire(self) -> float:
        """Seconds of a dense exchange of all gradients, as this rank sees the link now."""
        return dense_seconds(
            dense_link(self._sync), self._sync.device, sum(shape.nbytes for shape in self._sync.shapes)
        )
