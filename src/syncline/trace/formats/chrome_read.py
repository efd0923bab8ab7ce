"""Our own Chrome trace read back as the spans that it was written from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.trace.formats.json_stream import Limits
from syncline.trace.formats.trace_file import TraceFile
from syncline.trace.merge.metadata import checked_metadata
from syncline.trace.span import LANES, STEP, Span

_LANES = frozenset({*LANES, STEP})
_FAR = 1 << 53  # what a number of JSON holds exactly: microseconds, bytes, steps
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Reread:
    """The spans of a trace, what was written beside them, and sentences on what is missing."""

    spans: list[Span]
    metadata: dict[str, Any]
    notes: tuple[str, ...] = ()


def reread(path: Path, *, limits: Limits = Limits(spans=4_000_000)) -> Reread:  # noqa: B008 - it is frozen
    """The spans of a trace that `write_chrome_trace` wrote; `UsageError` for any other file.

    A file that stops early gives the spans up to there, and a note.
    """
    file = TraceFile(path, limits)
    spans: list[Span] = []
    for event in file.events():
        span = _span(event)
        if span is None:
            continue
        if len(spans) == limits.spans:
            raise UsageError(f"{path} has more than {limits.spans:,} spans: trace fewer steps")
        spans.append(span)
    if not spans:
        raise UsageError(f"{path} holds no spans of Syncline's: name a run folder, or a trace.json.gz from one")
    metadata = checked_metadata(file.header.get("otherData"))
    if origin := metadata.get("origin_ns"):
        spans = [replace(span, start=span.start + origin, end=span.end + origin) for span in spans]
    notes = (f"{path.name} ends {file.cut}: the spans up to there are used",) if file.cut else ()
    return Reread(spans, metadata, notes)


def _span(event: dict[str, Any]) -> Span | None:
    """The span of an event, times counted from the trace's first one; nothing where the event is none of ours."""
    lane, args = event.get("cat"), event.get("args")
    if event.get("ph") != "X" or not isinstance(lane, str) or lane not in _LANES or not isinstance(args, dict):
        return None
    rank, name, begin, length = (event.get(key) for key in ("pid", "name", "ts", "dur"))
    unit, step, size = args.get("unit"), args.get("step"), args.get("bytes")
    if not isinstance(name, str) or not isinstance(unit, str):
        return None
    if type(rank) is not int or type(step) is not int or type(size) is not int:
        return None
    if not isinstance(begin, int | float) or not isinstance(length, int | float):
        return None
    if not -_FAR < begin < _FAR or not 0 <= length < _FAR:
        return None
    if not 0 <= rank < _MOST_RANKS or not -_FAR < step < _FAR or not 0 <= size < _FAR:
        return None
    start = round(begin * 1000)
    end = start + round(length * 1000)
    return Span(rank, lane, name.removesuffix(unit).rstrip(), unit, step, start, end, size)
