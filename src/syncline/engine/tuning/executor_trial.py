"""Trial of plans: each runs for a few steps of the job and is timed, and the fastest stays.

Predictions do not decide between torch's reducer and our own executors: what separates them on a fast network is the
engine's own cost on this machine. Steps of a trial are steps of the job, so a trial costs only what a plan is slower.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from syncline.engine.tuning.race import CLOSE, Race, Timed
from syncline.engine.tuning.watch import Seen
from syncline.plan.buckets import SIZES, bucket_plan, bucket_plans
from syncline.plan.check import REDUCER_CODECS
from syncline.plan.costs import Costs
from syncline.plan.errors import Errors
from syncline.plan.planner import ALWAYS, WORTH
from syncline.plan.table import Plan
from syncline.plan.unit import Shape

TIMED = 3
"""Steps of each plan that are timed, after one that is not."""
SLOWER = 0.5
"""A plan whose first timed step is slower than the fastest plan by this share is not timed further. Where ranks share
cores, a single step varies by tens of percent: a small share would drop good plans."""
HOPELESS = 0.75
"""No trial of the reducer if the overlap is predicted to take less than this share of its step."""
TIE = 0.01
"""Of two plans whose steps differ by less, the earlier one stays: torch's reducer before ours. If the faster one loses
more, the planner's `WORTH` decides."""
MOST_SIZES = 2
"""How many bucket sizes are tried after a plan was found."""


class ExecutorTrial:
    """Plans that take turns. All numbers that it gets are the same on all ranks, and so are its answers."""

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        timed: Sequence[Timed] = (),
        then: Sequence[Callable[[Timed], Sequence[Plan]]] = (),
        enough: Callable[[Timed], bool] = lambda _: False,
        errors: Errors | None = None,
    ) -> None:
        """`timed`: plans that were timed before. `then`: each gives more plans when the fastest so far is known.

        `enough(first)`: the first plan need not be timed further, and no other one tried. `errors`: what codecs lose.
        """
        self._left, self._then, self.timed = list(plans), list(then), list(timed)
        self._errors = errors
        self._enough = enough

    @property
    def current(self) -> Plan | None:
        """The plan that is to be timed now; None after the last."""
        if self.timed and self._enough(self.timed[0]):
            return None
        while not self._left and self._then and self.timed:
            known = {one.plan.hash for one in self.timed}
            self._left = [plan for plan in self._then.pop(0)(self.fastest()) if plan.hash not in known]
        return self._left[0] if self._left else None

    def due(self, count: int) -> bool:
        """Whether the ranks should compare their times now: after the first timed step, and after the last."""
        return count == 1 or count >= TIMED

    def add(self, seen: Seen, count: int) -> bool:
        """What was seen in `count` timed steps of the current plan; False if it needs more steps."""
        now = Timed(self._left[0], seen, self._errors)
        stop = seen.step > self.fastest().step * (1 + SLOWER) if self.timed else self._enough(now)
        if count < TIMED and not stop:
            return False
        self._left.pop(0)
        self.timed.append(now)
        return True

    def fastest(self) -> Timed:
        """The plan to stay with."""
        return _fastest(self.timed)

    def fastest_of_ours(self) -> Timed | None:
        """The same among the plans for our own executor; None if none of them was timed."""
        ours = [one for one in self.timed if one.plan.executor == "overlap"]
        if not ours:
            return None
        best = self.fastest()
        return best if best.plan.executor == "overlap" else _fastest(ours)

    def race(self, *, close_if_short: float = CLOSE) -> Race:
        """The fastest plan against the others that were timed."""
        best = self.fastest()
        return Race(best, [one for one in self.timed if one is not best], close_if_short=close_if_short)


def _fastest(timed: Sequence[Timed]) -> Timed:
    """The fastest of these, or the one that loses least of those that are about as fast; of several, the first."""
    first = min(timed, key=lambda one: one.step)
    near = [one for one in timed if first.step >= one.step * (1 - (WORTH if one.lost < first.lost else TIE))]
    least = min(one.lost for one in near)
    near = [one for one in near if one.lost == least]
    limit = min(one.step for one in near)
    return next(one for one in near if limit >= one.step * (1 - TIE))


def other_codecs(base: Timed, shapes: Sequence[Shape]) -> list[Plan]:
    """The same buckets with BF16, if bytes matter. Half of them saves at most half of a single bucket's time."""
    if base.seen.exposed < WORTH * base.step * (2 if len(base.plan.units) == 1 else 1):
        return []
    arrival = _arrival(base.seen, shapes)
    return [bucket_plan(shapes, codec=codec, complete=arrival) for codec in ALWAYS if codec != _codec(base.plan)]


def other_sizes(best: Timed, shapes: Sequence[Shape]) -> list[Plan]:
    """The same codec with buckets of other sizes, if there is a wait to shorten."""
    if best.seen.exposed < WORTH * best.step:
        return []
    arrival = _arrival(best.seen, shapes)
    return [bucket_plan(shapes, codec=_codec(best.plan), bucket_bytes=size, complete=arrival) for size in SIZES]


def reducer_plans(
    overlap: Plan, step: float, shapes: Sequence[Shape], trained: Sequence[Shape], costs: Costs, codecs: Sequence[str]
) -> list[Plan]:
    """Plans for torch's reducer that may be faster than the planned overlap, which is predicted at `step` seconds.

    `codecs` are those that the reducer may use; none if another exchange is asked for.
    """
    if not set(codecs) <= set(REDUCER_CODECS):
        return []
    if any(unit.exchange != "allreduce" and unit.codec in codecs for unit in overlap.units):
        return []
    found = bucket_plans(shapes, trained, costs, codecs)
    return [plan for predicted, plan in found[:MOST_SIZES] if step > HOPELESS * predicted]


def measured(one: Timed) -> Plan:
    """Its plan, with the measured step among the plan's facts."""
    return replace(one.plan, about={"measured_ms": round(one.step * 1e3, 3), "chosen": _codec(one.plan)})


def _codec(plan: Plan) -> str:
    return plan.units[0].codec


def _arrival(seen: Seen, shapes: Sequence[Shape]) -> dict[str, float]:
    return {shape.name: place for shape, place in zip(shapes, seen.arrival, strict=True)}
