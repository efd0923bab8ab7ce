"""Freezes and reshapes of a traced run: cost and pay-back of each; frozen blocks, stages and replicas over time.

They are spans in the lane `between`: `freeze` with the unit "4 of 12 blocks", `reshape` with the unit "8x2 -> 4x4".
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from syncline.report.figures import rounded
from syncline.stats import median
from syncline.trace.span import STEP, Span

_FROZEN = re.compile(r"(\d+) of (\d+) blocks")
_SHAPES = re.compile(r"(\d+)x(\d+) -> (\d+)x(\d+)")
_NAMES = ("freeze", "reshape")
_LINES = ("frozen blocks", "stages", "replicas")


@dataclass(frozen=True)
class Change:
    """A freeze or a reshape, with the median steps since the change before it and until the one after it."""

    name: str
    what: str
    step: int
    at_s: float
    cost_ms: float
    before_ms: float | None
    after_ms: float | None
    together_ms: float
    """The cost of all changes between the same two steps: they are paid back together."""
    left_s: float
    """Seconds of the recording after it."""

    @property
    def payback_s(self) -> float | None:
        """Seconds of training until shorter steps have gained the cost; None where they had not at the end."""
        if self.before_ms is None or self.after_ms is None or self.after_ms >= self.before_ms:
            return None
        seconds = self.together_ms / (self.before_ms - self.after_ms) * self.after_ms / 1e3
        return seconds if seconds <= self.left_s else None


def changes(spans: Sequence[Span]) -> list[Change]:
    """The changes in the order of time on the first rank with any, each with the cost of the slowest rank.

    The first step after changes is slower than later ones, and counts for the last of them.
    """
    marked = [span for span in spans if span.lane == "between" and span.name in _NAMES]
    if not marked:
        return []
    rank = min(span.rank for span in marked)
    mine = sorted((span for span in marked if span.rank == rank), key=lambda span: span.start)
    steps = sorted((span for span in spans if span.lane == STEP and span.rank == rank), key=lambda span: span.start)
    origin = min(span.start for span in (*mine, *steps))
    costs: dict[tuple[int, str, str], float] = {}
    for span in marked:
        key = (span.step, span.name, span.unit)
        costs[key] = max(costs.get(key, 0.0), (span.end - span.start) / 1e6)
    made = []
    for place, span in enumerate(mine):
        later = [s for s in steps if s.start >= span.end]
        # A freeze and the reshape after it, with no step in between, have the same steps before and after.
        before = _median_step([s for s in steps if s.end <= span.start], mine, last=True)
        after = _median_step(later, mine, last=False)
        slow = max(0.0, (later[0].end - later[0].start) / 1e6 - after) if later and after is not None else 0.0
        last = place + 1 == len(mine) or mine[place + 1].step != span.step
        cost = costs[span.step, span.name, span.unit] + (slow if last else 0.0)
        together = slow + sum(ms for (step, _, _), ms in costs.items() if step == span.step)
        at = (span.start - origin) / 1e9
        left = max(0, steps[-1].end - span.end) / 1e9 if steps else 0.0
        made.append(Change(span.name, span.unit.partition(",")[0], span.step, at, cost, before, after, together, left))
    return made


def shape_over_time(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Lines of frozen blocks, stages and replicas over seconds, for a chart of the page; empty without changes."""
    found = changes(spans)
    if not found:
        return []
    shapes = [match for change in found if (match := _SHAPES.search(change.what))]
    stages, replicas = (int(shapes[0][1]), int(shapes[0][2])) if shapes else (0, 0)
    states = [(0.0, 0, stages, replicas)]
    for change in found:
        _, frozen, stages, replicas = states[-1]
        if match := _FROZEN.search(change.what):
            frozen = int(match[1])
        if match := _SHAPES.search(change.what):
            stages, replicas = int(match[3]), int(match[4])
        # Level until the change begins, then sloped for as long as it took.
        states += [(change.at_s, *states[-1][1:]), (change.at_s + change.cost_ms / 1e3, frozen, stages, replicas)]
    ends = [span.end for span in spans if span.lane == STEP]
    starts = [span.start for span in spans if span.lane == STEP]
    if ends:
        states.append((max(states[-1][0], (max(ends) - min(starts)) / 1e9), *states[-1][1:]))
    return [
        {"name": name, "cls": f"s{at}", "points": [[rounded(state[0]), state[at + 1]] for state in states]}
        for at, name in enumerate(_LINES)
        if any(state[at + 1] for state in states)
    ]


def _median_step(steps: Sequence[Span], between: Sequence[Span], *, last: bool) -> float | None:
    """The median length of the steps next to a change, up to the next other change; None if there are none."""
    if not steps:
        return None
    edge = steps[-1] if last else steps[0]
    if last:
        bound = max((c.end for c in between if c.end <= edge.start), default=0)
        near = [step for step in steps if step.start >= bound]
    else:
        limit = min((c.start for c in between if c.start >= edge.end), default=None)
        near = [step for step in steps if limit is None or step.end <= limit]
    return median([(step.end - step.start) / 1e6 for step in near])
