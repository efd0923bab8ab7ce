"""Aligns the ranks of one run that come from separate files: collectives, process groups, step numbers and clocks.

Ranks of one host share a clock, and its times are trusted. There, times also tell which steps are the same and which
collectives of different process groups have the same name. Between hosts, collectives that end together tell how far
clocks are apart.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice
from statistics import median

from syncline.trace.formats.collective_names import NEEDS_ALL_RANKS
from syncline.trace.formats.trace_file import RankTrace
from syncline.trace.span import STEP, Span, group_label, rank_list

_FEWEST = 3
_AGREE = 10_000  # nanoseconds: ends of a collective that differ by less on two hosts are the same time
_MOST_WAYS = 200  # ways to make up the ranks from groups that are compared

_Ranks = tuple[int, ...]
_TOLERANCE = 100_000  # nanoseconds: clocks of GPUs on one host differ by less
_ANY_HOST = frozenset({"", "localhost", "localhost.localdomain"})


def align(traces: Sequence[RankTrace]) -> tuple[list[str], bool]:
    """Make the ranks' traces comparable, in place; returns notes, and whether all ranks are on one clock."""
    notes: list[str] = []
    hosts = _by_host(traces)
    for mine in hosts:
        _number_alike(mine, notes)
        _separate_groups(mine)
    _name_alike(traces)
    placed, aligned = list(hosts[0]), True
    for mine in hosts[1:]:
        found, offset, spread = _clock_offset(placed, mine)
        who = f"rank{'s' if len(mine) > 1 else ''} {rank_list([trace.rank for trace in mine])}"
        if found < _FEWEST:
            notes.append(f"{who}: too few collectives with rank {traces[0].rank} and its like to compare their clocks")
            aligned = False
            continue
        placed += mine
        within = f"{found} collectives end that far apart, within {spread / 1e6:.3f} ms"
        if abs(offset) <= max(spread, _AGREE):
            notes.append(
                f"the clock of {who} was taken as it is: {found} collectives end at the same time on all hosts"
            )
            continue
        for trace in mine:
            trace.spans = [replace(span, start=span.start - offset, end=span.end - offset) for span in trace.spans]
        way = "back" if offset > 0 else "forward"
        notes.append(f"the clock of {who} was set {way} by {abs(offset) / 1e6:.3f} ms: {within}")
    for mine in hosts:
        if len(mine) > 1:
            ranks = rank_list([trace.rank for trace in mine])
            notes.append(f"ranks {ranks} ran on host {mine[0].host}: its clock was taken as it is")
    return notes, aligned


def _by_host(traces: Iterable[RankTrace]) -> list[list[RankTrace]]:
    """The traces of each host; where the host or its clock is not known, each rank is alone."""
    found: dict[Hashable, list[RankTrace]] = {}
    for trace in traces:
        known = trace.absolute and trace.host not in _ANY_HOST
        found.setdefault(trace.host if known else (trace.rank,), []).append(trace)
    return list(found.values())


def _number_alike(traces: Sequence[RankTrace], notes: list[str]) -> None:
    """On one clock: give steps that run at the same time the same number, that of the first rank."""
    first, *others = traces
    steps = _step_bounds(first)
    for trace in others:
        shifts: Counter[int] = Counter()
        for number, (start, end) in _step_bounds(trace).items():
            overlaps = {n: min(end, until) - max(start, begin) for n, (begin, until) in steps.items()}
            nearest = max(overlaps, key=lambda n: overlaps[n])
            if overlaps[nearest] > (end - start) / 2:
                shifts[nearest - number] += 1
        if not shifts:
            continue
        (shift, count), *_ = shifts.most_common(1)
        if shift and count > sum(shifts.values()) / 2:
            trace.renumber(shift)
            notes.append(f"rank {trace.rank} numbers the steps of rank {first.rank} {-shift:+d}: it was renumbered")


def _step_bounds(trace: RankTrace) -> dict[int, tuple[int, int]]:
    return {span.step: (span.start, span.end) for span in trace.spans if span.lane == STEP}


def _separate_groups(traces: Sequence[RankTrace]) -> None:
    """On one clock: name the process groups of collectives that do not say theirs (Gloo's do not).

    A collective that needs all its ranks runs on all of them at one moment. Ranks that were ever in the n-th such
    collective of a step at different times are in different groups.
    """
    found: dict[tuple[str, int, int], dict[int, dict[int, Span]]] = defaultdict(lambda: defaultdict(dict))
    for trace in traces:
        for (step, name, size, group, number), span in _keyed(trace).items():
            if not group and name in NEEDS_ALL_RANKS:
                found[name, size, number][step][trace.rank] = span
    known = {ranks: name for trace in traces for name, ranks in trace.groups}
    labels: dict[tuple[str, int, int], dict[int, str]] = {}
    for key, steps in found.items():
        rows = list(steps.values())
        apart = {pair for of in rows for pair in combinations(sorted(of), 2) if _apart(*(of[r] for r in pair))}
        if apart:
            ranks = sorted({rank for of in rows for rank in of})
            groups = _fitting(ranks, apart, known, rows) or _never_apart(ranks, apart)
            labels[key] = {rank: group_label(known.get(of, "unnamed"), of) for of in groups for rank in of}
    for trace in traces:
        renamed = {
            id(span): labels[name, size, number][trace.rank]
            for (_, name, size, group, number), span in _keyed(trace).items()
            if not group and (name, size, number) in labels
        }
        trace.spans = [
            replace(s, group=renamed[id(s)], unit=f"{s.unit} of group {renamed[id(s)]}") if id(s) in renamed else s
            for s in trace.spans
        ]


def _apart(one: Span, other: Span) -> bool:
    return max(one.start, other.start) > min(one.end, other.end) + _TOLERANCE


def _fitting(
    ranks: Sequence[int], apart: set[tuple[int, int]], known: Collection[_Ranks], rows: Sequence[Mapping[int, Span]]
) -> list[_Ranks]:
    """The known groups that hold each of these ranks once, and no two that were apart; none if there are none such.

    Of several ways the one counts in which the ends of the collective inside a group agree best.
    """
    usable = [of for of in known if len(of) > 1 and not any(pair in apart for pair in combinations(of, 2))]
    ways = list(islice(_ways(tuple(ranks), usable), _MOST_WAYS))

    def spread(way: Sequence[_Ranks]) -> int:
        ends = [[row[rank].end for rank in of if rank in row] for of in way for row in rows]
        return sum(max(of) - min(of) for of in ends if of)

    return min(ways, key=spread, default=[])


def _ways(ranks: _Ranks, groups: Sequence[_Ranks]) -> Iterator[list[_Ranks]]:
    """All ways to make up these ranks from groups."""
    if not ranks:
        yield []
    for group in groups:
        if ranks and group[0] == ranks[0] and set(group) <= set(ranks):
            for rest in _ways(tuple(rank for rank in ranks if rank not in group), groups):
                yield [group, *rest]


def _never_apart(ranks: Sequence[int], apart: set[tuple[int, int]]) -> list[_Ranks]:
    """Groups of ranks that were never apart."""
    groups: list[list[int]] = []
    for rank in ranks:
        mine = next((of for of in groups if all((other, rank) not in apart for other in of)), None)
        if mine is None:
            groups.append([rank])
        else:
            mine.append(rank)
    return [tuple(of) for of in groups]


def _name_alike(traces: Sequence[RankTrace]) -> None:
    """Give each collective the step and the unit name that the first rank of its group uses.

    It is the same collective if the process group and the sequence number are the same; where a trace has no sequence
    numbers, if it is the n-th of a step, an operation, a size and a group. Two communication threads may start theirs
    in a different order on another rank.
    """
    first: dict[Hashable, Span] = {}
    for trace in traces:
        known = {id(span): first.setdefault(key, span) for key, span in _identified(trace).items()}
        trace.spans = [
            replace(span, step=known[id(span)].step, unit=known[id(span)].unit) if id(span) in known else span
            for span in trace.spans
        ]


def _clock_offset(placed: Sequence[RankTrace], mine: Sequence[RankTrace]) -> tuple[int, int, int]:
    """How many collectives both sides share, how far the clock of `mine` is ahead, and the spread of that.

    A collective that needs all ranks ends at about the same time on all of them.
    """
    ends: dict[Hashable, list[int]] = defaultdict(list)
    for trace in placed:
        for key, span in _identified(trace).items():
            if span.name in NEEDS_ALL_RANKS:
                ends[key].append(span.end)
    found = [span.end - median(ends[key]) for trace in mine for key, span in _identified(trace).items() if key in ends]
    if not found:
        return 0, 0, 0
    offset = round(median(found))
    return len(found), offset, round(median(abs(one - offset) for one in found))


def _identified(trace: RankTrace) -> dict[Hashable, Span]:
    """The collectives of a rank by what identifies them on other ranks."""
    result: dict[Hashable, Span] = {}
    for key, span in _keyed(trace).items():
        sequence = trace.sequences.get((span.start, span.end, span.group))
        result[key if sequence is None else (span.group, span.name, "sequence", sequence)] = span
    return result


def _keyed(trace: RankTrace) -> dict[tuple[int, str, int, str, int], Span]:
    """The collectives of a rank by step, name, bytes, group, and number among those that agree in all of these."""
    seen: Counter[tuple[int, str, int, str]] = Counter()
    keyed: dict[tuple[int, str, int, str, int], Span] = {}
    for span in trace.spans:
        if span.lane == "exchange":
            kind = (span.step, span.name, span.bytes, span.group)
            keyed[*kind, seen[kind]] = span
            seen[kind] += 1
    return keyed
