"""What Perfetto and chrome://tracing take of a Chrome JSON trace, as a check of our own.

Times are read the way Perfetto reads them: microseconds as a double, times 1000, cut off.
"""

import json
import math
from collections import defaultdict

REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "B": {"name", "ts", "pid", "tid"},
    "E": {"ts", "pid", "tid"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    "M": {"name", "pid", "args"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def ns(value):
    """A time as Perfetto has it."""
    assert isinstance(value, int | float)
    assert math.isfinite(value)
    return int(value * 1000.0)


def check(trace):
    """Raise where the trace is not valid; returns its tracks: slices as (start, end, name) by (pid, tid)."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    events = trace if isinstance(trace, list) else trace["traceEvents"]
    last = 0
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int)
        assert event.get("tid") is None or isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in METADATA
            continue
        assert ns(event["ts"]) >= last, "by time"
        last = ns(event["ts"])
    tracks = _slices(events)
    _nest(tracks)
    _named(events, tracks)
    _arrows(events, tracks)
    _counters(events)
    return tracks


def _slices(events):
    tracks, open_slices = defaultdict(list), defaultdict(list)
    for event in events:
        track = (event["pid"], event.get("tid"))
        if event["ph"] == "X":
            assert event["dur"] >= 0
            start = ns(event["ts"])
            tracks[track].append((start, start + ns(event["dur"]), event["name"]))
        elif event["ph"] == "B":
            open_slices[track].append((ns(event["ts"]), event["name"]))
        elif event["ph"] == "E":
            start, name = open_slices[track].pop()
            tracks[track].append((start, ns(event["ts"]), name))
    assert not any(open_slices.values()), "every begin has its end"
    return tracks


def _nest(tracks):
    for track, slices in tracks.items():
        assert track != (0, 0), "Perfetto takes it for an idle processor"
        around = []
        for start, end, name in sorted(slices, key=lambda s: (s[0], -s[1])):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1], f"{name} reaches out of what is around it"
            around.append(end)


def _named(events, tracks):
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name" if "name" in e else "ph"] == "thread_name"
    }
    processes = {e["pid"] for e in events if e.get("name") == "process_name"}
    assert tracks.keys() <= threads.keys()
    assert {pid for pid, _ in tracks} <= processes
    assert len({(pid, name) for (pid, _), name in threads.items()}) == len(threads), "no name twice in a process"


def _arrows(events, tracks):
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            at = ns(event["ts"])
            ends[event["cat"], event["id"]].append((event["ph"], at))
            inside = [s for s in tracks[event["pid"], event["tid"]] if s[0] <= at < s[1]]
            assert inside, "an arrow is bound to a slice"
    for found in ends.values():
        assert [phase for phase, _ in found] == ["s", "f"], "each id has one begin and then one end"
        assert found[0][1] <= found[1][1]


def _counters(events):
    last = {}
    for event in events:
        if event["ph"] == "C":
            assert all(math.isfinite(value) and value >= 0 for value in event["args"].values())
            last[event["pid"], event["name"]] = event["args"]
    assert all(value == 0 for args in last.values() for value in args.values()), "at the end nothing is on the way"
