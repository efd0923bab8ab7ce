"""Tuning while the job runs: profile a few steps, probe link and codecs, plan, and plan again when steps drift.

Without `compress="auto"` the codecs stay as they are and only the launch order is found: the best one depends on how
compute and wire compare, which nobody knows beforehand.

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
from syncline.engine import pending
from syncline.engine.probe import codec_cost, line_of, link_samples
from syncline.engine.profile import Profile
from syncline.errors import UsageError
from syncline.plan.costs import CodecCost, Costs, Curve, Link
from syncline.plan.planner import ALWAYS, Choice, reorder, search
from syncline.plan.predict import predict
from syncline.plan.quality import NOISE, within
from syncline.spec import parse_one, show

if TYPE_CHECKING:
    from syncline.engine.sync import Sync

WARM_UP, PROFILED = 2, 4
WINDOW = 10
"""Steps between two looks at the step time."""
DRIFT = 0.3
"""A share by which the median step time must differ from what it was after planning."""
_HEAD = 5


def allowed_codecs(text: str) -> list[str] | None:
    """The lossy codecs of `"auto"` or `"auto(int8, powersgd(rank=4))"`; None if the spec is not auto."""
    if text.strip().partition("(")[0].strip() != "auto":
        return None
    call = parse_one(text)
    if call.kwargs:
        raise UsageError(f"'{text}': auto takes codecs, such as auto(int8, powersgd(rank=4)), or nothing")
    named = [show(arg) if isinstance(arg, tuple) else str(arg) for arg in call.args]
    for codec in named:
        exchange.legal(codec)
    return named or within(NOISE)


class Auto:
    """Finds the plan of a running job; with `allowed=None` the codecs stay and only the launch order is found."""

    def __init__(self, sync: "Sync", allowed: Sequence[str] | None) -> None:
        self._sync, self.allowed = sync, None if allowed is None else list(allowed)
        self.choice: Choice | None = None
        self.costs: Costs | None = None
        self.planned_at: list[int] = []
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._usual: float | None = None
        self._asked: tuple[Any, Tensor] | None = None
        self._last = 0.0
        self._steps = 0
        """Counted since attach: a resumed job is measured anew."""

    def stepped(self) -> None:
        """A step was counted; all ranks are here at the same one."""
        sync = self._sync
        now = time.perf_counter()
        if self._last:
            self._times.append(now - self._last)
        self._last = now
        self._steps += 1
        if self.choice is None and self._steps == WARM_UP:
            sync.wait()
            sync._profile = Profile(sync.device, sync._slots)
        with sync.here():
            if sync._profile is not None:
                self._profiling(sync._profile)
            elif self._asked is not None:
                self._hear(*self._asked)
            elif self.choice is not None and (sync.step - self.planned_at[-1]) % WINDOW == 0:
                self._ask()

    def _profiling(self, profile: Profile) -> None:
        sync = self._sync
        sync.wait()
        tickets = profile.stepped()
        if profile.count >= PROFILED:
            sync._profile = None
            with sync._watched.communicating("the measurements of auto"):
                self._plan(self._measured(profile))
        elif not sync._compiled.entered:
            for slot, ticket in zip(sync._slots, tickets, strict=True):
                pending.mark(slot.parameter, ticket)

    def _agreed(self, mine: Sequence[float]) -> list[float]:
        """The ranks' mean of each number: the same bits on all of them."""
        rows: Tensor = self._sync.groups.gather(torch.tensor(mine, dtype=torch.float64))
        means: list[float] = rows.mean(0).tolist()
        return means

    def _measured(self, profile: Profile) -> Costs:
        sync = self._sync
        table = self._agreed(profile.table())
        names = [slot.name for slot in sync._slots]
        head, rest = table[:_HEAD], table[_HEAD:]
        values = sum(shape.values for shape in sync.shapes)
        return Costs(
            world=sync.world,
            forward=head[1],
            backward=head[2],
            touched=dict(zip(names, rest[: len(names)], strict=True)),
            complete=dict(zip(names, rest[len(names) :], strict=True)),
            link=self._link(),
            codecs=self._codecs(),
            update=Curve(0.0, head[3] / max(1, values)),
            data=head[0],
            tail=head[4],
            lanes=sync._executor.lanes,
            # On the CPU codec work takes the cores that compute wants; a GPU has room beside it, mostly.
            contention=1.0 if sync.device.type == "cpu" else 0.1,
        )

    def _codecs(self) -> dict[str, CodecCost]:
        sync = self._sync
        shapes = sorted({s.shape for s in sync.shapes if len(s.shape) > 1}, key=lambda s: torch.Size(s).numel())
        chosen = [shapes[len(shapes) * k // 4] for k in (1, 3)] + shapes[-1:] if shapes else [(1 << 16,)]
        if self.allowed is None:
            specs = sorted({row.codec for row in sync.plan.units})
        else:
            specs = list(dict.fromkeys([*ALWAYS, *self.allowed]))
        costs: dict[str, CodecCost] = {}
        for spec in specs:
            cost = codec_cost(spec, list(dict.fromkeys(chosen)), sync.world, sync.device)
            lines = (cost.encode, cost.between, cost.decode)
            agreed = self._agreed([n for line in lines for n in (line.fixed, line.each)])
            costs[spec] = CodecCost(*(Curve(*agreed[i : i + 2]) for i in (0, 2, 4)))
        return costs

    def _link(self) -> Link:
        sync = self._sync
        links = next(iter(sync._links.values()))
        probe = links[0] if str(links[0].exchange) == "allreduce" else exchange.connect("allreduce", links[0].group)
        samples = self._agreed([n for pair in link_samples(probe, sync.device) for n in pair])
        latency, rate = line_of(list(zip(samples[::2], samples[1::2], strict=True)))
        return Link(latency, rate)

    def _plan(self, costs: Costs) -> None:
        sync = self._sync
        begin = sync.recorder.mark("update")
        self.costs = costs
        if self.allowed is None or sync._sentinel.fell:
            found = reorder(sync.plan, sync.shapes, costs)
            bound = predict(found.plan, sync.shapes, costs).bound
            why = f"launches ordered for a step of {found.step * 1e3:.1f} ms (bound {bound * 1e3:.1f} ms)"
            self.choice = Choice(found.plan, found.step, bound, (found,), why)
        else:
            self.choice = search(sync.shapes, costs, allowed=self.allowed)
            sync.say(f"step {sync.step}: {self.choice.why}")
        sync.replan(self.choice.plan)
        sync.recorder.add("update", "replan", begin, sync.recorder.mark("update"), unit=self.choice.plan.hash)
        self.planned_at.append(sync.step)
        self._times.clear()
        self._usual, self._last = None, 0.0

    def _ask(self) -> None:
        """Has the step time drifted? The ranks' answer is heard a step later: nobody waits for it."""
        if len(self._times) < WINDOW // 2:
            return
        mine = torch.tensor([statistics.median(self._times)], dtype=torch.float64)
        self._asked = dist.all_reduce(mine, group=self._sync.groups.control, async_op=True), mine

    def _hear(self, work: Any, total: Tensor) -> None:
        self._asked = None
        with self._sync._watched.communicating("the step times"):
            work.wait()
        now = float(total) / self._sync.world
        if self._usual is None:
            self._usual = now
        elif abs(now - self._usual) > DRIFT * self._usual:
            assert self.costs is not None
            self._sync.wait()
            if any(unit.fresh for unit in self._sync._units):
                return  # another optimizer has still to step: its states would be lost
            with self._sync._watched.communicating("the measurements of auto"):
                self._plan(replace(self.costs, link=self._link()))
