"""A trace made ready for analysis: spans by rank, the bounds of their steps, and the phases of each step."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from syncline.trace.analysis.timeline import Timeline, timeline
from syncline.trace.span import STEP, Span

Bounds = tuple[int, int]
_COMPUTE = ("forward", "backward", "update")


@dataclass(frozen=True)
class Prepared:
    """`ranks` are those that have steps (aggregators have none), `steps` those that all of them have."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    spans: dict[int, list[Span]]
    """By rank, aggregators too, in the order of their starts."""
    lines: dict[int, Timeline]
    bounds: dict[int, dict[int, Bounds]]
    parts: dict[int, dict[int, dict[str, int]]]
    """Nanoseconds by rank, step and phase."""
    notes: tuple[str, ...] = ()
    known: dict[int, list[Bounds]] = field(default_factory=dict)
    """By rank the times of which all is recorded, where steps are missing between them; else nothing."""

    @property
    def has_compute(self) -> bool:
        """Whether anything of forward, backward or update was recorded."""
        return any(part[lane] for of in self.parts.values() for part in of.values() for lane in _COMPUTE)

    def ms(self, rank: int, step: int) -> float:
        """How long a step was."""
        start, end = self.bounds[rank][step]
        return (end - start) / 1e6

    def series(self, steps: Iterable[int]) -> list[float]:
        """Each step's time, the mean over ranks."""
        return [sum(self.ms(rank, step) for rank in self.ranks) / len(self.ranks) for step in steps]

    def phase(self, phase: str, rank: int, steps: Iterable[int]) -> list[float]:
        """A phase's ms in each of the steps of a rank."""
        return [self.parts[rank][step][phase] / 1e6 for step in steps]


def prepare(spans: Iterable[Span], *, steps: tuple[int, int] | None = None) -> Prepared:
    """Sort a trace by rank and step; `steps` keeps those from the first number up to, without, the second."""
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append(span)
    notes: list[str] = []
    bounds = {rank: _bounds(mine) for rank, mine in by_rank.items()}
    if not any(bounds.values()):
        bounds = {rank: _guessed(mine) for rank, mine in by_rank.items()}
        notes.append("it has no spans of whole steps: a step is taken to last from its first span to the next one's")
    if steps is not None:
        bounds = {r: {n: b for n, b in of.items() if steps[0] <= n < steps[1]} for r, of in bounds.items()}
        by_rank = {rank: _within(mine, bounds) for rank, mine in by_rank.items()}
    ranks = tuple(sorted(rank for rank, of in bounds.items() if of))
    if not ranks:
        return Prepared((), (), {}, {}, {}, {}, tuple(notes))
    common = sorted(set.intersection(*(set(bounds[rank]) for rank in ranks)))
    lost = len(set.union(*(set(bounds[rank]) for rank in ranks))) - len(common)
    if lost:
        notes.append(f"{lost} steps are not there on every rank and were left out")
    ordered = {r: sorted(mine, key=lambda s: (s.start, s.end)) for r, mine in sorted(by_rank.items()) if mine}
    known = {rank: _known(of, chosen=steps is not None) for rank, of in bounds.items()}
    lines = {rank: timeline(mine, within=known[rank]) for rank, mine in ordered.items()}
    parts = {rank: {step: lines[rank].totals(*bounds[rank][step]) for step in common} for rank in ranks}
    return Prepared(ranks, tuple(common), ordered, lines, {r: bounds[r] for r in ranks}, parts, tuple(notes), known)


def _bounds(spans: Iterable[Span]) -> dict[int, Bounds]:
    return {span.step: (span.start, span.end) for span in spans if span.lane == STEP}


def _known(bounds: dict[int, Bounds], *, chosen: bool) -> list[Bounds]:
    """Stretches of steps one after the other. Between them is what nobody recorded, which may hide an exchange."""
    stretches: list[Bounds] = []
    for step in sorted(bounds):
        start, end = bounds[step]
        if step - 1 in bounds:
            start, before = stretches.pop()
            end = max(before, end)
        stretches.append((start, end))
    return stretches if chosen or len(stretches) > 1 else []


def _guessed(spans: Iterable[Span]) -> dict[int, Bounds]:
    starts: dict[int, int] = {}
    ends: list[int] = []
    for span in spans:
        starts[span.step] = min(span.start, starts.get(span.step, span.start))
        ends.append(span.end)
    order = sorted(starts, key=lambda step: starts[step])
    ends = [*(starts[step] for step in order[1:]), max(ends)] if ends else []
    return {step: (starts[step], end) for step, end in zip(order, ends, strict=True)}


def _within(spans: list[Span], bounds: dict[int, dict[int, Bounds]]) -> list[Span]:
    """What reaches into the time of the steps that are kept: an exchange may end in the step after its own."""
    edges = [bound for of in bounds.values() for bound in of.values()]
    if not edges:
        return []
    begin, end = min(start for start, _ in edges), max(end for _, end in edges)
    kept = {step for of in bounds.values() for step in of}
    return [s for s in spans if s.step in kept or (s.lane != STEP and s.end > begin and s.start < end)]
