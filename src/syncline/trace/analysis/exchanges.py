"""Exchanges across ranks: who came when, who came last and what it had been doing, what was wait and what transfer."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from syncline.stats import median_or_zero, winsorized_mean
from syncline.trace.analysis.steps import Prepared
from syncline.trace.span import BLOCKED, PHASES, Span


@dataclass(frozen=True, slots=True)
class Joined:
    """One rank's part in an exchange: it came `at`, its transfer began at `begin`; exposed times are nanoseconds."""

    rank: int
    at: int
    begin: int
    end: int
    bytes: int
    exposed_wait: float
    exposed: float
    moved: bool
    """Whether there is a transfer; a Horovod timeline knows of most ranks only when they came."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One exchange with all the ranks that took part."""

    step: int
    name: str
    unit: str
    joined: tuple[Joined, ...]

    @property
    def release(self) -> int:
        """When its last rank was there."""
        return max(one.at for one in self.joined)

    @property
    def moved(self) -> bool:
        """Whether any transfer was recorded."""
        return any(one.moved for one in self.joined)

    def awaited(self, one: Joined) -> int | None:
        """The rank that `one` waited for, if it did."""
        if one.begin <= one.at:
            return None
        last = max((other for other in self.joined if other.at <= one.begin), key=lambda other: other.at)
        return last.rank if last.rank != one.rank and last.at > one.at else None


@dataclass(frozen=True)
class Late:
    """A rank that others waited for: `wait_ms` a step on each of them, `share` of all such waits.

    `excess` says by phase how much longer than the others it took before it came. `gains` are, for each steady step,
    what all the others waited: the step would be that much shorter without.
    """

    rank: int
    share: float
    wait_ms: float
    excess: dict[str, float]
    gains: tuple[float, ...]

    @property
    def doing(self) -> str | None:
        """What it was doing when the others were there already."""
        phase = max(self.excess, key=lambda phase: self.excess[phase], default=None)
        return phase if phase is not None and self.excess[phase] > 0 else None

    def as_json(self) -> dict[str, object]:
        """As in the analysis."""
        return {"rank": self.rank, "share": self.share, "wait_ms": self.wait_ms, "doing": self.doing}


def meetings(trace: Prepared) -> list[Meeting]:
    """The exchanges, in the order in which their last ranks came."""
    together: dict[tuple[int, str, str, int], list[Joined]] = defaultdict(list)
    for rank, spans in trace.spans.items():
        seen: dict[tuple[int, str, str], int] = defaultdict(int)
        for span, joined in _joined(rank, spans, trace.lines[rank].exposed):
            key = (span.step, span.name, span.unit)
            together[*key, seen[key]].append(joined)
            seen[key] += 1
    found = [Meeting(step, name, unit, tuple(joined)) for (step, name, unit, _), joined in together.items()]
    return sorted(found, key=lambda meeting: meeting.release)


def _joined(rank: int, spans: Sequence[Span], exposed: Sequence[float]) -> Iterator[tuple[Span, Joined]]:
    """A rank's exchanges; a wait belongs to the transfer of its name and unit that begins where it ends."""
    pending: dict[tuple[int, str, str], int] = {}

    def alone(index: int) -> tuple[Span, Joined]:
        span = spans[index]
        return span, Joined(rank, span.start, span.end, span.end, 0, exposed[index], 0.0, moved=False)

    for index, span in enumerate(spans):
        key = (span.step, span.name, span.unit)
        if span.lane == "wait" and span.name != BLOCKED:
            if key in pending:
                yield alone(pending[key])
            pending[key] = index
        elif span.lane == "exchange":
            before = pending.pop(key, None)
            if before is not None and spans[before].end != span.start:
                yield alone(before)
                before = None
            at, waited = (span.start, 0.0) if before is None else (spans[before].start, exposed[before])
            yield span, Joined(rank, at, span.start, span.end, span.bytes, waited, exposed[index], moved=True)
    for index in pending.values():
        yield alone(index)


def late_ranks(trace: Prepared, found: Sequence[Meeting], steps: Sequence[int]) -> tuple[Late, ...]:
    """The ranks that others waited for in these steps, the one that cost most first."""
    kept = set(steps)
    # late rank, waiting rank, step: nanoseconds
    waits: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    for meeting in found:
        step = _counts_in(meeting.step, trace, kept)
        if step is not None:
            for one in meeting.joined:
                late = meeting.awaited(one) if one.exposed_wait else None
                if late is not None:
                    waits[late][one.rank][step] += one.exposed_wait
    totals = {late: sum(sum(of.values()) for of in by.values()) for late, by in waits.items()}
    whole = sum(totals.values())
    excess = _excess(trace, found, kept) if trace.has_compute else {}
    result = []
    for late in sorted(totals, key=lambda rank: -totals[rank]):
        others = [rank for rank in trace.ranks if rank != late]
        gains = tuple(min((waits[late][rank][step] for rank in others), default=0.0) / 1e6 for step in steps)
        each = totals[late] / 1e6 / max(1, len(others)) / max(1, len(steps))
        result.append(Late(late, totals[late] / whole, each, excess.get(late, {}), gains))
    return tuple(result)


def _counts_in(step: int, trace: Prepared, kept: set[int]) -> int | None:
    """The step that an exchange's waits count in: where its own was not sampled, the next, which it reaches into."""
    if step in kept:
        return step
    return step + 1 if step + 1 in kept and step not in trace.bounds[trace.ranks[0]] else None


def _excess(trace: Prepared, found: Sequence[Meeting], kept: set[int]) -> dict[int, dict[str, float]]:
    """By late rank and phase: ms a step that it took longer than the others, from where all were together last.

    Ranks were together when the last one came to an exchange. From there to its own coming every rank's time is
    phases, so that they tell exactly why one came later.
    """
    releases = [meeting.release for meeting in found]
    latest: dict[tuple[int, int, int], Meeting] = {}
    for meeting in found:
        step = _counts_in(meeting.step, trace, kept)
        if step is None or len(meeting.joined) < 2:
            continue
        first = min(one.at for one in meeting.joined)
        together = bisect_right(releases, first) - 1
        last = max(meeting.joined, key=lambda one: one.at)
        if last.at == first or not any(one.exposed_wait for one in meeting.joined):
            continue
        # Exchanges that follow the same meeting have waits at the same time: the last of them has the whole story.
        key = (last.rank, together, step)
        if key not in latest or latest[key].release < meeting.release:
            latest[key] = meeting
    values: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    for (rank, together, step), meeting in latest.items():
        begin = releases[together] if together >= 0 else min(_begins(trace, step), default=meeting.release)
        for phase, ms in _longer(trace, meeting, begin).items():
            values[rank][step][phase] += ms
    return {
        rank: {
            phase: winsorized_mean([of[step][phase] if step in of else 0.0 for step in sorted(kept)])
            for phase in _CAUSES
        }
        for rank, of in values.items()
    }


_CAUSES = tuple(phase for phase in PHASES if phase != "wait")


def _begins(trace: Prepared, step: int) -> Iterable[int]:
    return (trace.bounds[rank][step][0] for rank in trace.ranks if step in trace.bounds[rank])


def _longer(trace: Prepared, meeting: Meeting, begin: int) -> dict[str, float]:
    last = max(meeting.joined, key=lambda one: one.at)
    mine = trace.lines[last.rank].totals(begin, max(begin, last.at))
    others = [
        trace.lines[one.rank].totals(begin, max(begin, one.at)) for one in meeting.joined if one.rank != last.rank
    ]
    return {phase: (mine[phase] - median_or_zero([other[phase] for other in others])) / 1e6 for phase in _CAUSES}
