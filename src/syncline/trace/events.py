"""Building blocks of Chrome trace JSON: times, names of tracks, spans that share a track, the file."""

import gzip
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def micros(ns: int) -> float:
    """Nanoseconds as the microseconds of a trace, so that readers get the same nanosecond back.

    Perfetto multiplies by 1000 and cuts off: a quotient that was rounded down would come out a nanosecond early, and a
    span would reach into the next one of its track.
    """
    value = ns / 1000
    return value if int(value * 1000.0) >= ns else math.nextafter(value, math.inf)


def slots(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """For intervals in the order of their starts: the first track on which each is behind all before it."""
    ends: list[int] = []
    chosen = []
    for start, end in intervals:
        slot = next((i for i, busy_until in enumerate(ends) if busy_until <= start), len(ends))
        ends[slot : slot + 1] = [end]
        chosen.append(slot)
    return chosen


def names(pid: int, label: str, tids: Iterable[tuple[int, str]]) -> list[Event]:
    """Metadata: a process, its threads, and that they are shown in the order of their numbers."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    ]
    for tid, name in tids:
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return events


def write_json(content: Any, path: Path) -> int:
    """Write JSON atomically, compressed when the name ends in `.gz`; returns the file's size."""
    data = json.dumps(content).encode()
    data = gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)
    return len(data)
