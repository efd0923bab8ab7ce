"""Work that is not training: what is known about the time between steps, and what makes some steps long."""

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.stats import mean_or_zero
from syncline.trace.analysis.steps import Prepared
from syncline.trace.intervals import covered
from syncline.trace.span import PHASES

KNOWN = {"checkpoint": "between", "logging": "between", "validation": "forward"}
"""Work that the recorder recognises, and the phase that its time counts in."""

_SPAN_NAMES = {"validation": "evaluation"}
_WORTH = 0.05  # of the extra time: smaller causes are not named


@dataclass(frozen=True)
class LongSteps:
    """Steps that take `extra_ms` longer than the usual ones; `causes` has that time by phase or known work."""

    count: int
    extra_ms: float
    per_step_ms: float
    """The extra time divided by all steady steps."""
    causes: tuple[tuple[str, float], ...]

    def as_json(self) -> dict[str, object]:
        """As in the analysis."""
        return {
            "count": self.count,
            "extra_ms": self.extra_ms,
            "per_step_ms": self.per_step_ms,
            "causes": [{"what": name, "extra_ms": ms} for name, ms in self.causes],
        }


def known_work(trace: Prepared, steps: Sequence[int]) -> dict[str, float]:
    """Ms per step of each kind of known work, the mean over ranks."""
    return {name: mean_or_zero([_spent(trace, rank, steps, name) for rank in trace.ranks]) for name in KNOWN}


def long_steps(trace: Prepared, usual: Sequence[int], long: Sequence[int]) -> LongSteps | None:
    """What the long steps have more of than the usual ones; None if there are none."""
    if not long or not usual:
        return None
    extra = mean_or_zero(trace.series(long)) - mean_or_zero(trace.series(usual))
    causes = {phase: _phase(trace, phase, long) - _phase(trace, phase, usual) for phase in PHASES}
    before, after = known_work(trace, usual), known_work(trace, long)
    for name, phase in KNOWN.items():
        causes[name] = after[name] - before[name]
        causes[phase] -= causes[name]
    named = sorted(((name, ms) for name, ms in causes.items() if ms > _WORTH * extra), key=lambda pair: -pair[1])
    return LongSteps(len(long), extra, extra * len(long) / (len(long) + len(usual)), tuple(named))


def _phase(trace: Prepared, phase: str, steps: Sequence[int]) -> float:
    return mean_or_zero([mean_or_zero(trace.phase(phase, rank, steps)) for rank in trace.ranks])


def _spent(trace: Prepared, rank: int, steps: Sequence[int], name: str) -> float:
    lane, called = KNOWN[name], _SPAN_NAMES.get(name, name)
    spans = [(s.start, s.end) for s in trace.spans[rank] if s.lane == lane and s.name == called]
    if not spans or not steps:
        return 0.0
    bounds = [trace.bounds[rank][step] for step in steps]
    # The union of two sets of intervals, minus either, leaves their common part.
    return (covered(spans) + covered(bounds) - covered([*spans, *bounds])) / 1e6 / len(steps)
