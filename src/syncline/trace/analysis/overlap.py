"""Overlap: how much of communication and compression is hidden behind compute, or behind data loading."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from syncline.stats import mean_or_zero
from syncline.trace.analysis.steps import Prepared
from syncline.trace.analysis.timeline import timeline
from syncline.trace.span import COMPUTE_LANES, Span


def overlap(
    spans: Iterable[Span],
    *,
    of: str = "exchange",
    under: Collection[str] = COMPUTE_LANES,
    within: Sequence[tuple[int, int]] = (),
) -> float | None:
    """The share of the time of lane `of` that lies under other lanes, on ONE rank.

    None if the lane never runs, or if no lane that could hide it was recorded. `within`: outside these intervals only
    hidden time counts.

    >>> step = dict(rank=0, name="", unit="", step=0)
    >>> overlap([Span(lane="backward", start=0, end=10, **step), Span(lane="exchange", start=5, end=25, **step)])
    0.25
    """
    edges: list[tuple[int, int, int, int]] = []
    for start, end in within:
        edges += [(start, 0, 0, 1), (end, 0, 0, -1)]
    for span in spans:
        mine, theirs = int(span.lane == of), int(span.lane in under)
        if mine or theirs:
            edges += [(span.start, mine, theirs, 0), (span.end, -mine, -theirs, 0)]
    edges.sort()
    if not any(theirs for _, _, theirs, _ in edges):
        return None
    running = covering = at = whole = hidden = 0
    known = int(not within)
    for time, mine, theirs, step in edges:
        if running and (covering or known):
            whole += time - at
            hidden += (time - at) if covering else 0
        at, running, covering, known = time, running + mine, covering + theirs, known + step
    return hidden / whole if whole else None


def hidden_share(trace: Prepared, steps: Sequence[int], lane: str) -> float | None:
    """The share of a lane's time in these steps that compute hides, the mean over ranks; decode counts as encode.

    Time between recorded steps counts only where recorded compute hides it: nobody knows what else ran there.
    """
    kept = set(steps)
    lanes = {"encode": ("encode", "decode")}.get(lane, (lane,))
    values = []
    for rank in trace.ranks:
        # Compute of any step may hide it, also the next one's.
        mine = [s for s in trace.spans[rank] if s.lane in COMPUTE_LANES or (s.lane in lanes and s.step in kept)]
        made = [replace(s, lane=lane) if s.lane in lanes and s.lane != lane else s for s in mine]
        values.append(overlap(made, of=lane, within=trace.recorded.get(rank, ())))
    known = [value for value in values if value is not None]
    return mean_or_zero(known) if known else None


def hidden_by_data(trace: Prepared, steps: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """By rank: ms of each step in which only data loading hides transfers or compression.

    That time becomes visible if samples are loaded ahead.
    """
    return {rank: _hidden_by_data(trace, rank, steps) for rank in trace.ranks}


def _hidden_by_data(trace: Prepared, rank: int, steps: Sequence[int]) -> tuple[float, ...]:
    spans = trace.spans.get(rank, [])
    if not any(span.lane == "data" for span in spans):
        return (0.0,) * len(steps)
    without = timeline([span for span in spans if span.lane != "data"])
    result = []
    for step in steps:
        shown, seen = without.totals(*trace.bounds[rank][step]), trace.parts[rank][step]
        result.append(sum(shown[phase] - seen[phase] for phase in ("exposed_encode", "exposed_exchange")) / 1e6)
    return tuple(result)
