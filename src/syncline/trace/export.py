"""Chrome trace JSON that chrome://tracing and Perfetto accept: spans of a track never overlap.

A process a rank, a track a lane and further tracks where spans of a lane overlap; arrows from the rank that came last
to an exchange to those that waited for it; counters of what is on the way.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from syncline.trace.counters import counters
from syncline.trace.events import Event, micros, names, slots, write_json
from syncline.trace.releases import releases
from syncline.trace.span import LANES, STEP, Span

FORMAT = "syncline trace 1"
_ORDER = (STEP, *LANES)


def chrome_trace(spans: Iterable[Span], *, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """The trace as a JSON object; times count from its first span, whose own time is in `otherData.origin_ns`."""
    spans = sorted(spans, key=lambda s: (s.start, s.end))
    origin = spans[0].start if spans else 0
    tids, named = _tracks(spans)
    # By time; at the same time a span before the arrow that is bound to it.
    timed = [(s.start, _complete(s, tid, origin)) for s, tid in zip(spans, tids, strict=True)]
    timed += _arrows(spans, tids, origin)
    timed += [(c.at, _counter(c.rank, c.name, c.value, c.at - origin)) for c in counters(spans)]
    timed.sort(key=lambda pair: pair[0])
    return {
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, "origin_ns": origin, **(metadata or {})},
        "traceEvents": [*named, *(event for _, event in timed)],
    }


def write_chrome_trace(spans: Iterable[Span], path: Path, *, metadata: dict[str, Any] | None = None) -> None:
    """Write the trace atomically, compressed when the name ends in `.gz`."""
    write_json(chrome_trace(spans, metadata=metadata), path)


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


def _arrows(spans: Sequence[Span], tids: Sequence[int], origin: int) -> list[tuple[int, Event]]:
    timed: list[tuple[int, Event]] = []
    for number, (late, waiting) in enumerate(releases(spans), start=1):
        for phase, index in (("s", late), ("f", waiting)):
            span = spans[index]
            event: Event = {"ph": phase, "id": number, "name": "last to come", "cat": "release", "pid": span.rank}
            event |= {"tid": tids[index], "ts": micros(span.start - origin)}
            timed.append((span.start, event | ({"bp": "e"} if phase == "f" else {})))
    return timed


def _counter(rank: int, name: str, value: Mapping[str, float], ns: int) -> Event:
    return {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": micros(ns), "args": dict(value)}
