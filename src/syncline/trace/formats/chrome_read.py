"""Reads a Chrome trace that Syncline wrote: the same spans come back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.trace.formats.json_stream import Limits
from syncline.trace.formats.trace_file import RankTrace, TraceFile, fields, rank_traces, times
from syncline.trace.merge.merge_ranks import Trace
from syncline.trace.merge.metadata import MAX_RANKS, checked_metadata
from syncline.trace.span import LANES, STEP, Span
from syncline.wording import plural

KIND = "syncline"
"""The name of this format."""

_LANES = (*LANES, STEP)  # no set: a file may have anything in its place, which may not be hashable


def recognises(file: TraceFile, event: dict[str, Any]) -> bool:
    """Whether one event shows that Syncline wrote the file."""
    del file
    return event.get("ph") == "X" and event.get("cat") in _LANES and "unit" in fields(event)


def read(file: TraceFile) -> list[RankTrace]:
    """The ranks of the file, for a trace that is made from several files."""
    found = read_chrome_trace(file.path, limits=file.limits)
    return rank_traces(file, found.spans, list(found.notes))


def read_chrome_trace(path: Path, *, limits: Limits | None = None) -> Trace:
    """A trace that `write_chrome_trace` wrote; `UsageError` for any other file.

    A file that stops early gives the spans up to there, and a note.
    """
    file = TraceFile(path, limits or Limits(spans=4_000_000))
    spans: list[Span] = []
    impossible = 0
    for event in file.events():
        if span := _span(event):
            file.keep()
            spans.append(span)
        else:
            impossible += recognises(file, event)
    if not spans and impossible:
        raise UsageError(f"{path}: {_impossible(impossible)}, and there are no others: record it again")
    if not spans:
        raise UsageError(f"{path} holds no spans of Syncline's: name a run folder, or a trace.json.gz from one")
    metadata = checked_metadata(file.header.get("otherData"))
    if origin := metadata.get("origin_ns"):
        spans = [replace(span, start=span.start + origin, end=span.end + origin) for span in spans]
    notes = [f"{path.name} ends {file.cut}: the spans up to there are used"] if file.cut else []
    if impossible:
        notes.append(f"{_impossible(impossible)} and were left out")
    # Waits were split off when the trace was merged.
    return Trace.of(spans, metadata=metadata, notes=notes, path=path, split=False)


def _impossible(count: int) -> str:
    return f"{plural(count, 'span')} have an impossible time, step or size"


def _span(event: dict[str, Any]) -> Span | None:
    """The span of an event, with times since the first span; None if the event is no span of Syncline's."""
    rank, name, when, args = event.get("pid"), event.get("name"), times(event), fields(event)
    unit = args.get("unit")
    if event.get("ph") != "X" or "dur" not in event or when is None or type(rank) is not int:
        return None
    if not 0 <= rank < MAX_RANKS or not isinstance(name, str) or not isinstance(unit, str):
        return None
    row = [event.get("cat"), name.removesuffix(unit).rstrip(), unit, args.get("step"), *when, args.get("bytes")]
    row += [args.get("group", ""), args.get("stream", "")]
    try:
        return Span.from_untrusted_row(rank, row)
    except ValueError:
        return None
