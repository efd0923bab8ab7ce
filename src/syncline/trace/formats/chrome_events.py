"""Building blocks of Chrome trace JSON: times, track names, assignment of spans to tracks, writing the file."""

import gzip
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from syncline.files import check_target, writing

Event = dict[str, Any]

_CHUNK = 4096


def micros(ns: int) -> float:
    """Nanoseconds as microseconds, so that readers get the same nanosecond back.

    Perfetto multiplies by 1000 and truncates: a quotient that was rounded down would be a nanosecond early, and a span
    would overlap the next one of its track. Exact for traces of up to 40 days.
    """
    value = ns / 1000
    return value if int(value * 1000.0) >= ns else math.nextafter(value, math.inf)


def slots(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """For intervals sorted by start: the first track on which each interval follows all earlier ones."""
    ends: list[int] = []
    chosen = []
    for start, end in intervals:
        slot = next((i for i, busy_until in enumerate(ends) if busy_until <= start), len(ends))
        ends[slot : slot + 1] = [end]
        chosen.append(slot)
    return chosen


def names(pid: int, label: str, tids: Iterable[tuple[int, str]]) -> list[Event]:
    """Metadata events: the names of a process and its threads, shown in the order of their numbers."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    ]
    for tid, name in tids:
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return events


def write_events(events: Iterable[Event], path: Path, *, head: Mapping[str, Any] | None = None) -> None:
    """Write a trace atomically, compressed when the name ends in `.gz`.

    With a `head` the file is an object with the events under `traceEvents`, else an array. Events are written as they
    come, so a large trace is never in memory as a whole.
    """
    check_target(path)
    part = path.with_name(path.name + ".part")
    encode = json.JSONEncoder().encode
    rest, between = iter(events), ""
    try:
        # Without a name and a time in it, the same events give the same compressed file.
        with (
            writing(path),
            part.open("wb") as raw,
            gzip.GzipFile("", "wb", 6, raw, 0) if path.suffix == ".gz" else nullcontext(raw) as file,
        ):
            file.write(b"[" if head is None else f'{encode(dict(head))[:-1]}, "traceEvents": ['.encode())
            while chunk := list(islice(rest, _CHUNK)):
                file.write((between + ",\n".join(map(encode, chunk))).encode())
                between = ",\n"
            file.write(b"]" if head is None else b"]}")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
