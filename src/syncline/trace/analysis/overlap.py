"""How much of the communication is hidden behind compute."""

from collections.abc import Collection, Iterable, Sequence

from syncline.trace.span import Span

COMPUTE = frozenset({"forward", "backward", "update"})
"""Lanes that can hide another."""


def overlap(
    spans: Iterable[Span],
    *,
    of: str = "exchange",
    under: Collection[str] = COMPUTE,
    within: Sequence[tuple[int, int]] = (),
) -> float | None:
    """The share of the time in which `of` runs that lies under other lanes, on ONE rank.

    Nothing where it never runs, or where none of the lanes was recorded that could hide it. With `within` what lies in
    none of these times counts only where it is hidden.

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
