"""The exclusive partition: every nanosecond of a step is given to one phase, so that phases sum to the step.

Compute wins over communication: an exchange that runs behind the backward pass costs nothing and is not
shown; what is left visible is exposed. An exchange cannot move data before its last rank has joined, so the time
before that is a wait for the late rank, not communication.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from syncline.trace.analysis.timeline import timeline
from syncline.trace.span import PHASES, STEP, Span


def split_waits(spans: Iterable[Span]) -> list[Span]:
    """Cut every exchange at the moment its last rank joined: before it a `wait` span, after it the exchange.

    Spans of one exchange have the same step, name and unit on every rank; where a step repeats them, the n-th of one
    rank belongs to the n-th of the others. A rank that joined after a span had ended was not waited for: in an exchange
    made of sends and receives not everybody needs everybody. Needs the ranks' clocks to agree.
    """
    spans = list(spans)
    seen: dict[tuple[int, int, str, str], int] = defaultdict(int)
    keys: list[tuple[int, str, str, int] | None] = []
    starts: dict[tuple[int, str, str, int], list[int]] = defaultdict(list)
    for span in spans:
        if span.lane != "exchange":
            keys.append(None)
            continue
        mine = (span.rank, span.step, span.name, span.unit)
        key = (span.step, span.name, span.unit, seen[mine])
        seen[mine] += 1
        starts[key].append(span.start)
        keys.append(key)
    result = []
    for span, place in zip(spans, keys, strict=True):
        cut = span.start if place is None else max(start for start in starts[place] if start <= span.end)
        if cut > span.start:
            result.append(replace(span, lane="wait", end=cut, bytes=0))
            result.append(replace(span, start=cut))
        else:
            result.append(span)
    return result


def partition(spans: Iterable[Span]) -> dict[int, dict[str, int]]:
    """Nanoseconds by phase for each step of ONE rank; they sum to that step's wall time exactly.

    A span counts in every step that it reaches into: an exchange may end in the next step's forward pass.
    """
    spans = list(spans)
    bounds = {span.step: (span.start, span.end) for span in spans if span.lane == STEP}
    phases = timeline(spans)
    return {step: phases.totals(*bounds[step]) for step in sorted(bounds)}


def shares(steps: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
    """Shares by phase over several steps; they sum to 1."""
    totals = {phase: sum(step[phase] for step in steps.values()) for phase in PHASES}
    whole = sum(totals.values())
    return {phase: total / whole if whole else 0.0 for phase, total in totals.items()}
