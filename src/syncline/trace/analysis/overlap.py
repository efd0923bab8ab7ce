"""Overlap: how much of communication and compression is hidden behind compute, or behind data loading."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from syncline.stats import mean_of_known
from syncline.trace.analysis.steps import Prepared
from syncline.trace.analysis.timeline import timeline
from syncline.trace.intervals import covered
from syncline.trace.span import COMPUTE_LANES, Span, is_copy


def overlap(spans: Iterable[Span], *, of: str = "exchange", within: Sequence[tuple[int, int]] = ()) -> float | None:
    """The share of the time of lane `of` that lies under compute, on ONE rank. A GPU's copies hide nothing.

    None if the lane never runs, or if no compute was recorded. `within`: outside these intervals only
    hidden time counts.

    >>> step = dict(rank=0, name="", unit="", step=0)
    >>> overlap([Span(lane="backward", start=0, end=10, **step), Span(lane="exchange", start=5, end=25, **step)])
    0.25
    """
    spans = list(spans)
    mine = [(span.start, span.end) for span in spans if span.lane == of]
    hiding = [(span.start, span.end) for span in spans if span.lane in COMPUTE_LANES and not is_copy(span)]
    shown = covered([*mine, *hiding]) - covered(hiding)
    hidden = covered(mine) - shown
    if within:
        shown -= covered([*mine, *hiding, *within]) - covered([*hiding, *within])
    return hidden / (hidden + shown) if hiding and hidden + shown else None


def hidden_share(trace: Prepared, steps: Sequence[int], lane: str) -> float | None:
    """The share of a lane's time in these steps that compute hides, the mean over ranks; decode counts as encode.

    Time between recorded steps counts only where recorded compute hides it: nobody knows what else ran there.
    """
    kept = set(steps)
    lanes = {"encode": ("encode", "decode")}.get(lane, (lane,))
    values = []
    for rank in trace.ranks:
        # Compute of any step may hide it, also the next one's.
        made = [replace(s, lane=lane) for s in trace.spans[rank] if s.lane in lanes and s.step in kept]
        made += [s for s in trace.spans[rank] if s.lane in COMPUTE_LANES]
        values.append(overlap(made, of=lane, within=trace.recorded.get(rank, ())))
    return mean_of_known(values)


def hidden_by(lane: str, trace: Prepared, steps: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """By rank: ms of each step in which only this lane (`data`, `between`) hides transfers or compression.

    That time becomes visible without the lane's work.
    """
    result = {}
    for rank in trace.ranks:
        if not any(span.lane == lane for span in trace.spans[rank]):
            result[rank] = (0.0,) * len(steps)
            continue
        without = timeline([span for span in trace.spans[rank] if span.lane != lane], on_gpu=trace.on_gpu)
        shown = [without.totals(*trace.bounds[rank][step]) for step in steps]
        result[rank] = tuple(
            sum(other[phase] - trace.parts[rank][step][phase] for phase in ("exposed_encode", "exposed_exchange")) / 1e6
            for step, other in zip(steps, shown, strict=True)
        )
    return result
