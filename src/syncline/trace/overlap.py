"""How much of the communication is hidden behind compute."""

from collections.abc import Collection, Iterable

from syncline.trace.span import Span

COMPUTE = frozenset({"forward", "backward", "update"})
"""Lanes that can hide another."""


def overlap(spans: Iterable[Span], *, of: str = "exchange", under: Collection[str] = COMPUTE) -> float | None:
    """The share of the time in which `of` runs that lies under other lanes, on ONE rank.

    Nothing where it never runs, or where none of the lanes was recorded that could hide it.

    >>> step = dict(rank=0, name="", unit="", step=0)
    >>> overlap([Span(lane="backward", start=0, end=10, **step), Span(lane="exchange", start=5, end=25, **step)])
    0.25
    """
    edges: list[tuple[int, int, int]] = []
    for span in spans:
        mine, theirs = int(span.lane == of), int(span.lane in under)
        if mine or theirs:
            edges += [(span.start, mine, theirs), (span.end, -mine, -theirs)]
    edges.sort()
    if not any(theirs for _, _, theirs in edges):
        return None
    running = covering = at = whole = hidden = 0
    for time, mine, theirs in edges:
        if running:
            whole += time - at
            hidden += (time - at) if covering else 0
        at, running, covering = time, running + mine, covering + theirs
    return hidden / whole if whole else None
