"""Steps for a Horovod timeline, which has none: training reduces every gradient once a step."""

from dataclasses import dataclass

from syncline.trace.formats.profiler_lanes import Step, step_at
from syncline.trace.span import STEP, Span


@dataclass(frozen=True, slots=True)
class Row:
    """A span to be, of the `turn`-th operation on its tensor; `step` is negative where the timeline does not say it."""

    rank: int
    lane: str
    name: str
    unit: str
    start: int
    end: int
    bytes: int
    step: int
    turn: int


def stepped(rows: list[Row], base: int) -> list[Span]:
    """The spans with their steps, times shifted by `base`, and a `step` span for every step of every rank.

    The n-th operation on a tensor is in step n when the tensor is reduced as often as any other, give or take the step
    in which the file ends; other tensors (a broadcast at the start, a metric at the end) go by time.
    """
    numbers = _numbers(rows)
    steps = _bounds(rows, numbers)
    spans = [
        Span(rank, STEP, STEP, "", number, base + start, base + end)
        for rank in sorted({row.rank for row in rows})
        for number, start, end in steps
    ]
    for row, number in zip(rows, numbers, strict=True):
        step = number
        if step < 0:
            step = max(0, step_at(steps, row.start, row.end))
            step = steps[-1][0] if steps and row.start >= steps[-1][2] else step
        spans.append(Span(row.rank, row.lane, row.name, row.unit, step, base + row.start, base + row.end, row.bytes))
    return spans


def _numbers(rows: list[Row]) -> list[int]:
    """The step of each row, negative where only its time can tell."""
    turns: dict[str, int] = {}
    for row in rows:
        turns[row.unit] = max(row.turn + 1, turns.get(row.unit, 0))
    most = max(turns.values(), default=0)
    once = {row.unit for row in rows if row.name == "broadcast"}
    regular = {unit for unit, count in turns.items() if count >= max(1, most - 1) and unit not in once}
    return [row.step if row.step >= 0 else row.turn if row.unit in regular else -1 for row in rows]


def _bounds(rows: list[Row], numbers: list[int]) -> list[Step]:
    starts: dict[int, int] = {}
    for row, number in zip(rows, numbers, strict=True):
        if number >= 0:
            starts[number] = min(row.start, starts.get(number, row.start))
    if not starts:
        starts = {0: min((row.start for row in rows), default=0)}
    order = sorted(starts)
    end = max((row.end for row in rows), default=0)
    bounds: list[Step] = []
    for number, following in zip(order, [*order[1:], -1], strict=True):
        begin = max(starts[number], bounds[-1][2]) if bounds else starts[number]
        bounds.append((number, begin, max(begin, starts.get(following, end))))
    return bounds
