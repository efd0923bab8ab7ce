"""A trace prepared for analysis: spans by rank, the bounds of steps, the phases of each step, exposed times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from syncline.stats import quantile, upper_limit
from syncline.trace.analysis.timeline import Timeline, timeline
from syncline.trace.merge.exchanges import Exchange, Member
from syncline.trace.merge.merge_ranks import Trace
from syncline.trace.span import COMPUTE_LANES, STEP, Span
from syncline.wording import plural

FEWEST = 3
"""The least number of steady steps for a verdict."""
Bounds = tuple[int, int]
_RARE = 0.25  # share of the steps: what happens in more of them belongs to a usual step
_FAR = 1.5  # times the upper quartile: on a busy machine many steps are somewhat slower than the median


@dataclass(frozen=True)
class Prepared:
    """`ranks` are those that have steps (aggregators have none), `steps` those that all of these ranks have."""

    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    spans: dict[int, list[Span]] = field(default_factory=dict)
    """By rank (aggregators too), in the order of their starts."""
    exchanges: list[Exchange] = field(default_factory=list)
    """In the order in which their last ranks joined."""
    timelines: dict[int, Timeline] = field(default_factory=dict)
    bounds: dict[int, dict[int, Bounds]] = field(default_factory=dict)
    parts: dict[int, dict[int, dict[str, int]]] = field(default_factory=dict)
    """Nanoseconds by rank, step and phase."""
    notes: tuple[str, ...] = ()
    on_gpu: bool = False
    recorded: dict[int, list[Bounds]] = field(default_factory=dict)
    """By rank: the times that are recorded, if steps are missing between them; else empty."""
    exposed: dict[Span, float] = field(default_factory=dict)
    """Nanoseconds of exchanges and waits that nothing hid; spans that were hidden are not in it."""

    @property
    def has_compute(self) -> bool:
        """Whether any forward, backward or update was recorded."""
        return any(part[lane] for of in self.parts.values() for part in of.values() for lane in COMPUTE_LANES)

    def ms(self, rank: int, step: int) -> float:
        """The duration of a step."""
        start, end = self.bounds[rank][step]
        return (end - start) / 1e6

    def series(self, steps: Iterable[int]) -> list[float]:
        """The duration of each step, the mean over ranks."""
        return [sum(self.ms(rank, step) for rank in self.ranks) / len(self.ranks) for step in steps]

    def phase(self, phase: str, rank: int, steps: Iterable[int]) -> list[float]:
        """A phase's ms in each of the steps of a rank."""
        return [self.parts[rank][step][phase] / 1e6 for step in steps]

    def exposed_ns(self, span: Span | None) -> float:
        """The time of an exchange or a wait that nothing hid."""
        return 0.0 if span is None else self.exposed.get(span, 0.0)


def prepare(trace: Trace, *, steps: tuple[int, int] | None = None) -> Prepared:
    """Group a trace by rank and step; `steps` keeps those from the first number up to, without, the second."""
    by_rank = trace.by_rank()
    notes: list[str] = []
    bounds = {r: {s.step: (s.start, s.end) for s in mine if s.lane == STEP} for r, mine in by_rank.items()}
    if not any(bounds.values()):
        bounds = {rank: _guessed(mine) for rank, mine in by_rank.items()}
        notes.append("it has no spans of whole steps: a step is taken to last from its first span to the next one's")
    exchanges = trace.exchanges
    if steps is not None:
        bounds = {r: {n: b for n, b in of.items() if steps[0] <= n < steps[1]} for r, of in bounds.items()}
        by_rank = {rank: _within(mine, bounds) for rank, mine in by_rank.items()}
        exchanges = _of_spans(exchanges, {span for mine in by_rank.values() for span in mine})
    ranks = tuple(sorted(rank for rank, of in bounds.items() if of))
    if not ranks:
        return Prepared(notes=tuple(notes))
    common = sorted(set.intersection(*(set(bounds[rank]) for rank in ranks)))
    lost = len(set.union(*(set(bounds[rank]) for rank in ranks))) - len(common)
    if lost:
        notes.append(f"{plural(lost, 'step')} that not every rank has: left out")
    ordered = {r: sorted(mine, key=lambda s: (s.start, s.end)) for r, mine in sorted(by_rank.items()) if mine}
    recorded = {rank: _recorded(of, chosen=steps is not None) for rank, of in bounds.items()}
    timelines = {rank: timeline(mine, within=recorded[rank], on_gpu=trace.on_gpu) for rank, mine in ordered.items()}
    return Prepared(
        ranks=ranks,
        steps=tuple(common),
        spans=ordered,
        exchanges=exchanges,
        timelines=timelines,
        bounds={rank: bounds[rank] for rank in ranks},
        parts={rank: {step: timelines[rank].totals(*bounds[rank][step]) for step in common} for rank in ranks},
        notes=tuple(notes),
        on_gpu=trace.on_gpu,
        recorded=recorded,
        exposed={
            span: ns
            for rank, mine in ordered.items()
            for span, ns in zip(mine, timelines[rank].exposed, strict=True)
            if ns
        },
    )


def usual_places(series: Sequence[float], first: int = 0) -> list[int]:
    """The places of a series of step times without those of long steps, counted from `first`.

    A step is long if it is well above the median and above most of the slower steps, and if at most a quarter of the
    steps are: then something happens in some steps only. All figures of a step are means over the others.

    >>> usual_places([20.0, 21.0, 19.0, 90.0, 20.0])
    [0, 1, 2, 4]
    """
    if not series:
        return []
    limit = max(upper_limit(series), _FAR * quantile(series, 1 - _RARE))
    usual = [place for place, ms in enumerate(series, first) if ms <= limit]
    return usual if len(series) - len(usual) <= ceil(_RARE * len(series)) else list(range(first, first + len(series)))


def _recorded(bounds: dict[int, Bounds], *, chosen: bool) -> list[Bounds]:
    """Intervals of consecutive steps. Between them nothing is recorded, and unknown work may hide an exchange."""
    stretches: list[Bounds] = []
    for step in sorted(bounds):
        start, end = bounds[step]
        if step - 1 in bounds:
            start, before = stretches.pop()
            end = max(before, end)
        stretches.append((start, end))
    return stretches if chosen or len(stretches) > 1 else []


def _guessed(spans: Sequence[Span]) -> dict[int, Bounds]:
    """Steps that last from their first span to the next step's."""
    starts: dict[int, int] = {}
    for span in spans:
        starts[span.step] = min(span.start, starts.get(span.step, span.start))
    order = sorted(starts, key=lambda step: starts[step])
    ends = [*(starts[step] for step in order[1:]), max(span.end for span in spans)]
    return {step: (starts[step], end) for step, end in zip(order, ends, strict=True)}


def _within(spans: list[Span], bounds: dict[int, dict[int, Bounds]]) -> list[Span]:
    """Spans of the kept steps, and spans that overlap their time: an exchange may end in the step after its own."""
    edges = [bound for of in bounds.values() for bound in of.values()]
    if not edges:
        return []
    begin, end = min(start for start, _ in edges), max(end for _, end in edges)
    kept = {step for of in bounds.values() for step in of}
    return [s for s in spans if s.step in kept or (s.lane != STEP and s.end > begin and s.start < end)]


def _of_spans(exchanges: Iterable[Exchange], kept: set[Span]) -> list[Exchange]:
    """The exchanges, with only those waits and transfers that are among the kept spans."""
    found = []
    for exchange in exchanges:
        pairs = [[span if span in kept else None for span in (m.wait, m.transfer)] for m in exchange.members]
        if members := tuple(Member(*pair) for pair in pairs if any(pair)):
            found.append(replace(exchange, members=members))
    return sorted(found, key=lambda exchange: exchange.last_joined)
