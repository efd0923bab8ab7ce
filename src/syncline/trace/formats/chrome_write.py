"""Writes a trace as Chrome trace JSON, which chrome://tracing and Perfetto open.

One process per rank and one track per lane, process group and stream, with further tracks where spans of a track
overlap, since they may not. Arrows lead from the last rank to join an exchange to the ranks that waited for it.
Counters show the bytes in flight and the sending rate.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from syncline.trace.formats.chrome_events import Event, micros, names, slots, write_events
from syncline.trace.merge.exchanges import Exchange
from syncline.trace.merge.merge_ranks import Trace
from syncline.trace.span import LANES, STEP, Span, device_track, track_order

FORMAT = "syncline trace 1"
_ORDER = (STEP, *LANES)


def write_chrome_trace(trace: Trace, path: Path) -> None:
    """Write the trace atomically, compressed if the name ends in `.gz`."""
    write_events(chrome_events(trace), path, head=chrome_head(trace))


def chrome_head(trace: Trace) -> dict[str, Any]:
    """The part before the events; `otherData.origin_ns` is the start of the first span."""
    origin = min((span.start for span in trace.spans), default=0)
    return {"displayTimeUnit": "ms", "otherData": {"format": FORMAT, "origin_ns": origin, **trace.metadata}}


def chrome_events(trace: Trace) -> Iterator[Event]:
    """The events in the order of their times, which count from the start of the first span."""
    spans = sorted(trace.spans, key=lambda s: (s.start, s.end))
    origin = spans[0].start if spans else 0
    tids, named = _tracks(spans)
    yield from named
    complete = ((s.start, _complete(s, tid, origin)) for s, tid in zip(spans, tids, strict=True))
    tid_of = {span: tid for span, tid in zip(spans, tids, strict=True) if span.lane == "exchange"}
    # At the same time a span comes before the arrow that is bound to it.
    timed = (complete, _arrows(trace.exchanges, tid_of, origin), _counters(spans, origin))
    for _, event in heapq.merge(*timed, key=lambda pair: pair[0]):
        yield event


def _tracks(spans: Sequence[Span]) -> tuple[list[int], list[Event]]:
    """The thread number of each span, and the metadata that names processes and threads."""
    lanes: dict[int, dict[tuple[str, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, span in enumerate(spans):
        lanes[span.rank][span.lane, device_track(span)].append(index)
    of = [0] * len(spans)
    named: list[Event] = []
    for rank in sorted(lanes):
        # From 1: Perfetto takes thread 0 of process 0 for an idle processor.
        labels: list[str] = []
        for lane, track in sorted(lanes[rank], key=lambda key: (_ORDER.index(key[0]), track_order(key[1]))):
            members = lanes[rank][lane, track]
            chosen = slots((spans[i].start, spans[i].end) for i in members)
            for index, slot in zip(members, chosen, strict=True):
                of[index] = len(labels) + 1 + slot
            label = f"{lane}, {track}" if track else lane
            labels += [label if slot == 0 else f"{label} {slot + 1}" for slot in range(max(chosen) + 1)]
        named += names(rank, f"rank {rank}", enumerate(labels, start=1))
    return of, named


def _complete(span: Span, tid: int, origin: int) -> Event:
    where = {key: value for key, value in (("group", span.group), ("stream", span.stream)) if value}
    return {
        "ph": "X",
        "name": f"{span.name} {span.unit}".strip(),
        "cat": span.lane,
        "pid": span.rank,
        "tid": tid,
        "ts": micros(span.start - origin),
        "dur": micros(span.end - span.start),
        "args": {"step": span.step, "unit": span.unit, "bytes": span.bytes, **where},
    }


def _arrows(exchanges: Sequence[Exchange], tids: Mapping[Span, int], origin: int) -> Iterator[tuple[int, Event]]:
    """Arrows from the last rank to join an exchange to each rank that waited for it, in the order of their times.

    A collective has no single sender: its data move once the last rank is there, so the arrows start there.
    """
    pairs = sorted(_released(exchanges), key=lambda pair: pair[1].start)
    for number, (late, waiting) in enumerate(pairs, start=1):
        for phase, span in (("s", late), ("f", waiting)):
            event: Event = {"ph": phase, "id": number, "name": "last to join", "cat": "release", "pid": span.rank}
            event |= {"tid": tids[span], "ts": micros(span.start - origin)}
            yield span.start, event | ({"bp": "e"} if phase == "f" else {})


def _released(exchanges: Sequence[Exchange]) -> Iterator[tuple[Span, Span]]:
    """Pairs of transfers: of the last rank to join, and of a rank that waited for it.

    Viewers bind an arrow to a span that lasts, so transfers without a length have none.
    """
    for exchange in exchanges:
        lasting = {m.rank: m.transfer for m in exchange.members if m.transfer and m.transfer.end > m.transfer.start}
        for member in exchange.members:
            rank = exchange.late_rank(member)
            if rank in lasting and member.rank in lasting and lasting[rank].start == lasting[member.rank].start:
                yield lasting[rank], lasting[member.rank]


def _counters(spans: Iterable[Span], origin: int) -> Iterator[tuple[int, Event]]:
    """By rank: bytes in flight, and Mbit/s (each exchange's bytes over its time, summed over those under way)."""
    edges: list[tuple[int, int, int, int, float]] = []
    for span in spans:
        if span.lane == "exchange" and span.bytes > 0 and span.end > span.start:
            rate = span.bytes * 8e3 / (span.end - span.start)
            edges.append((span.start, span.rank, 1, span.bytes, rate))
            edges.append((span.end, span.rank, -1, -span.bytes, -rate))
    edges.sort()
    under_way: dict[int, int] = defaultdict(int)
    size: dict[int, int] = defaultdict(int)
    speed: dict[int, float] = defaultdict(float)
    for (at, rank), changes in groupby(edges, key=lambda edge: edge[:2]):
        for _, _, change, more, faster in changes:
            under_way[rank] += change
            size[rank] += more
            speed[rank] += faster
        if not under_way[rank]:
            speed[rank] = 0.0  # sums of fractions do not return to zero exactly
        where = {"pid": rank, "tid": 0, "ts": micros(at - origin)}
        yield at, {"ph": "C", "name": "in flight", **where, "args": {"bytes": size[rank]}}
        rate = round(max(0.0, speed[rank]), 3)
        yield at, {"ph": "C", "name": "sending", **where, "args": {"Mbit/s": rate}}
