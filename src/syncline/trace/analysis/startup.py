"""Start-up: the first steps, which are slower than the steady ones, their extra cost and its causes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.stats import mean_or_zero, upper_limit
from syncline.trace.analysis.steps import FEWEST, Prepared, usual_places
from syncline.trace.span import PHASES

PLANNING = ("replan", "probe")
"""Names of the spans in which Syncline measures and plans; they are in the lane `update`."""

_FEWEST = 5  # a shorter series has no second half to compare with
_LOOK = 5  # steady state begins when these many steps, all but one, are like the later ones


@dataclass(frozen=True)
class StartUp:
    """The first `steps` steps took `extra_ms` more than as many steady ones; `causes` has that time by phase."""

    first: int
    """The first steady step."""
    steps: int
    first_step_ms: float
    steady_ms: float
    extra_ms: float
    causes: tuple[tuple[str, float], ...]

    def as_json(self) -> dict[str, object]:
        """As in the analysis."""
        return {
            "first_step_ms": self.first_step_ms,
            "steady_ms": self.steady_ms,
            "extra_ms": self.extra_ms,
            "steps": self.steps,
            "causes": [{"phase": phase, "extra_ms": ms} for phase, ms in self.causes],
        }


def start_up(trace: Prepared) -> StartUp:
    """Find the first steady step from the step times and from Syncline's planning spans."""
    series = trace.series(trace.steps)
    planned = _planned(trace)
    begin = first_steady(series)
    if trace.steps[0] == 0 and len(series) > 1:
        begin = max(begin, 1)
    made = [place for place, step in enumerate(trace.steps) if "replan" in planned.get(step, {})]
    # Before its first plan Syncline measures, with another plan. But if the trace begins with a tuned job that plans
    # again near the end, because a step got slower, the steps before that are what was recorded.
    if made and made[0] + 1 + FEWEST <= len(series):
        begin = max(begin, made[0] + 1)
    usual = mean_or_zero([series[place] for place in usual_places(series[begin:], begin)])
    early, late = trace.steps[:begin], trace.steps[begin:]
    extra = sum(ms - usual for ms in series[:begin])
    return StartUp(
        first=trace.steps[begin],
        steps=begin,
        first_step_ms=series[0],
        steady_ms=usual,
        extra_ms=max(0.0, extra),
        causes=_causes(trace, early, late, planned) if extra > 0 else (),
    )


def first_steady(series: Sequence[float]) -> int:
    """The index from which on a series of step times looks like its second half.

    >>> first_steady([900.0, 20.0, 300.0, 21.0, 19.0, 20.0, 22.0, 20.0, 21.0, 20.0])
    3
    """
    if len(series) < _FEWEST:
        return 0
    later = series[len(series) // 2 :]
    limit = upper_limit(later)
    for place in range(len(series) // 2 + 1):
        following = series[place : place + _LOOK]
        # Too slow to be chance: DDP rebuilds its buckets. But if later steps are as slow, such steps are not start-up.
        rebuilds = max(following) > 4 * max(limit, max(later) / 4)
        if following[0] <= limit and sum(ms > limit for ms in following) <= 1 and not rebuilds:
            return place
    return len(series) // 2


def _planned(trace: Prepared) -> dict[int, dict[str, float]]:
    """Milliseconds of planning by step and name, the mean over ranks."""
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for rank in trace.ranks:
        for span in trace.spans[rank]:
            if span.lane == "update" and span.name in PLANNING:
                found[span.step][span.name] += (span.end - span.start) / 1e6 / len(trace.ranks)
    return found


def _causes(
    trace: Prepared, early: Sequence[int], late: Sequence[int], planned: dict[int, dict[str, float]]
) -> tuple[tuple[str, float], ...]:
    """By phase, planning apart: ms that the early steps took longer than as many late ones, the largest first."""
    extra: dict[str, float] = dict.fromkeys(PLANNING, 0.0)
    usual: dict[str, float] = {}
    for phase in PHASES:
        usual[phase] = mean_or_zero([mean_or_zero(trace.phase(phase, rank, late)) for rank in trace.ranks])
        spent = mean_or_zero([sum(trace.phase(phase, rank, early)) for rank in trace.ranks])
        extra[phase] = spent - usual[phase] * len(early)
    for step in early:
        names = planned.get(step, {})
        own = sum(names.values())
        # Measurements for the plan run in the same update, before the planning span: they count as planning too.
        spent = mean_or_zero([trace.parts[rank][step]["update"] / 1e6 for rank in trace.ranks])
        for name, ms in names.items():
            share = max(own, spent - usual["update"]) * (ms / own if own else 1 / len(names))
            extra[name] += share
            extra["update"] -= share
    whole = sum(ms for ms in extra.values() if ms > 0)
    return tuple(sorted(((name, ms) for name, ms in extra.items() if ms > 0.01 * whole), key=lambda pair: -pair[1]))
