"""Chrome trace JSON that chrome://tracing and Perfetto accept: spans of a track never overlap.

A process a rank, a track a lane and further tracks where spans of a lane overlap; arrows from the rank that came last
to an exchange to those that waited for it; counters of what is on the way.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from syncline.trace.formats.chrome_events import Event, micros, names, slots, write_events
from syncline.trace.formats.counters import Count, counters
from syncline.trace.formats.releases import releases
from syncline.trace.span import LANES, STEP, Span

FORMAT = "syncline trace 1"
_ORDER = (STEP, *LANES)


def chrome_trace(spans: Iterable[Span], *, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The trace as a JSON object."""
    spans = list(spans)
    return {**chrome_head(spans, metadata=metadata), "traceEvents": list(chrome_events(spans))}


def write_chrome_trace(spans: Iterable[Span], path: Path, *, metadata: Mapping[str, Any] | None = None) -> None:
    """Write the trace atomically, compressed when the name ends in `.gz`."""
    spans = list(spans)
    write_events(chrome_events(spans), path, head=chrome_head(spans, metadata=metadata))


def chrome_head(spans: Sequence[Span], *, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What comes before the events; the first span's own time is in `otherData.origin_ns`."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, "origin_ns": min((s.start for s in spans), default=0), **(metadata or {})},
    }


def chrome_events(spans: Iterable[Span]) -> Iterator[Event]:
    """The events in the order of their times, which count from the first span."""
    spans = sorted(spans, key=lambda s: (s.start, s.end))
    origin = spans[0].start if spans else 0
    tids, named = _tracks(spans)
    yield from named
    complete = ((s.start, _complete(s, tid, origin)) for s, tid in zip(spans, tids, strict=True))
    counts = ((c.at, _counter(c, origin)) for c in counters(spans))
    # At the same time a span comes before the arrow that is bound to it.
    for _, event in heapq.merge(complete, _arrows(spans, tids, origin), counts, key=lambda pair: pair[0]):
        yield event


def _tracks(spans: Sequence[Span]) -> tuple[list[int], list[Event]]:
    """The thread number of each span, and the metadata that names processes and threads."""
    lanes: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, span in enumerate(spans):
        lanes[span.rank][span.lane].append(index)
    of = [0] * len(spans)
    named: list[Event] = []
    for rank in sorted(lanes):
        # From 1: Perfetto takes thread 0 of process 0 for an idle processor.
        labels: list[str] = []
        for lane in sorted(lanes[rank], key=_place):
            members = lanes[rank][lane]
            chosen = slots((spans[i].start, spans[i].end) for i in members)
            for index, slot in zip(members, chosen, strict=True):
                of[index] = len(labels) + 1 + slot
            labels += [lane if slot == 0 else f"{lane} {slot + 1}" for slot in range(max(chosen) + 1)]
        named += names(rank, f"rank {rank}", enumerate(labels, start=1))
    return of, named


def _place(lane: str) -> tuple[int, str]:
    return (_ORDER.index(lane) if lane in _ORDER else len(_ORDER), lane)


def _complete(span: Span, tid: int, origin: int) -> Event:
    return {
        "ph": "X",
        "name": f"{span.name} {span.unit}".strip(),
        "cat": span.lane,
        "pid": span.rank,
        "tid": tid,
        "ts": micros(span.start - origin),
        "dur": micros(span.end - span.start),
        "args": {"step": span.step, "unit": span.unit, "bytes": span.bytes},
    }


def _arrows(spans: Sequence[Span], tids: Sequence[int], origin: int) -> Iterator[tuple[int, Event]]:
    for number, (late, waiting) in enumerate(releases(spans), start=1):
        for phase, index in (("s", late), ("f", waiting)):
            span = spans[index]
            event: Event = {"ph": phase, "id": number, "name": "last to come", "cat": "release", "pid": span.rank}
            event |= {"tid": tids[index], "ts": micros(span.start - origin)}
            yield span.start, event | ({"bp": "e"} if phase == "f" else {})


def _counter(count: Count, origin: int) -> Event:
    where = {"pid": count.rank, "tid": 0, "ts": micros(count.at - origin)}
    return {"ph": "C", "name": count.name, **where, "args": count.value}
