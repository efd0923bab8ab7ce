"""Aligns the ranks of one run that come from separate files: the same names for collectives, and one clock."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from syncline.trace.formats.collective_names import NEEDS_ALL_RANKS
from syncline.trace.formats.trace_file import RankTrace
from syncline.trace.span import Span

_NEAR = 1_000_000  # nanoseconds: ranks of one host share a clock, and ends differ by less than this
_FEWEST = 3

_Key = tuple[int, str, int, int]


def name_alike(traces: Sequence[RankTrace]) -> None:
    """Give collectives the unit name that the first rank uses: the n-th of a step, an operation and a size.

    Two communication threads may start theirs in a different order on another rank.
    """
    first = {key: span.unit for key, span in _keyed(traces[0]).items()}
    for trace in traces[1:]:
        names = {id(span): first[key] for key, span in _keyed(trace).items() if key in first}
        trace.spans = [replace(s, unit=names[id(s)]) if names.get(id(s), s.unit) != s.unit else s for s in trace.spans]


def align(traces: Sequence[RankTrace]) -> tuple[list[str], bool]:
    """Shift every rank to the first one's clock where the clocks differ; returns notes, and whether all ranks agree.

    A collective that needs all ranks ends at about the same time on all of them: the median difference is the offset.
    """
    first = traces[0]
    ends = {key: span.end for key, span in _keyed(first).items() if span.name in NEEDS_ALL_RANKS}
    notes: list[str] = []
    kept: list[int] = []
    aligned = True
    for trace in traces[1:]:
        found = [span.end - ends[key] for key, span in _keyed(trace).items() if key in ends]
        if len(found) < _FEWEST:
            notes.append(f"rank {trace.rank} shares too few collectives with rank {first.rank} to compare their clocks")
            aligned = False
            continue
        offset = round(median(found))
        if trace.absolute and first.absolute and first.host and trace.host == first.host and abs(offset) < _NEAR:
            kept.append(trace.rank)
            continue
        spread = median(abs(one - offset) for one in found)
        trace.spans = [replace(span, start=span.start - offset, end=span.end - offset) for span in trace.spans]
        notes.append(
            f"rank {trace.rank}'s clock was set back by {offset / 1e6:.3f} ms to rank {first.rank}'s:"
            f" {len(found)} collectives end that far apart, within {spread / 1e6:.3f} ms"
        )
    if kept:
        ranks = ", ".join(str(rank) for rank in kept)
        notes.append(f"rank {ranks} ran on rank {first.rank}'s host {first.host}: clocks were taken as they are")
    return notes, aligned


def _keyed(trace: RankTrace) -> dict[_Key, Span]:
    seen: Counter[tuple[int, str, int]] = Counter()
    keyed: dict[_Key, Span] = {}
    for span in trace.spans:
        if span.lane == "exchange":
            kind = (span.step, span.name, span.bytes)
            keyed[*kind, seen[kind]] = span
            seen[kind] += 1
    return keyed
