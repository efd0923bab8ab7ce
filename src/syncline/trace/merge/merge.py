"""Spans of all ranks on one clock: rank 0's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from syncline.trace.analysis.partition import split_waits
from syncline.trace.merge.clocks import Clock
from syncline.trace.span import Span


@dataclass(frozen=True)
class Part:
    """One rank's spans on its own clock, and what is known of that clock."""

    rank: int
    spans: Sequence[Span]
    host: str = ""
    """Ranks with the same text read the same clock (`clocks.host()`)."""
    clock: Clock | None = None
    """As measured against rank 0; None where it was not."""


@dataclass(frozen=True)
class Merged:
    """All ranks' spans on one clock, waits cut out of exchanges; `notes` are sentences on what is missing."""

    spans: list[Span]
    notes: tuple[str, ...] = ()
    clock_error_ns: float | None = 0.0
    """How far times of different ranks can be apart from the truth; None where some clock was not measured."""


def merge(parts: Sequence[Part]) -> Merged:
    """One list of spans from the ranks' own; waits are split where all clocks are known.

    Ranks of rank 0's host need no measurement. Of several ranks of another host the best measurement counts for all.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    known = [part for part in parts if part.clock is not None]
    # With rank 0 gone, clocks that were measured against it still agree; without any, the first one is as good.
    zero = next((part.host for part in parts if part.rank == 0 or not known), None)
    hosts = {part.host: Clock() if part.host == zero else _best(known, part.host) for part in parts}
    unknown = [part.rank for part in parts if hosts[part.host] is None]
    spans = [_aligned(span, hosts[part.host]) for part in parts for span in part.spans]
    if unknown:
        return Merged(spans, (_unknown(unknown),), None)
    error = max((clock.error for clock in hosts.values() if clock is not None), default=0.0)
    return Merged(split_waits(spans), (), error)


def _best(known: Sequence[Part], host: str) -> Clock | None:
    clocks = [part.clock for part in known if part.host == host and part.clock is not None]
    return min(clocks, key=lambda clock: clock.error, default=None)


def _aligned(span: Span, clock: Clock | None) -> Span:
    if clock is None or clock == Clock():
        return span
    return replace(span, start=clock.align(span.start), end=clock.align(span.end))


def _unknown(ranks: Sequence[int]) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return (
        f"{who} ran on another host and no clock was measured: times are not aligned there, and waits for a late rank"
        " are not told from transfers"
    )
