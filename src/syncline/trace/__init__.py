"""What happened: spans, their partition of a step, their export, and the import of others' traces."""

from syncline.trace.analysis.analysis import Analysis, analyze
from syncline.trace.analysis.overlap import overlap
from syncline.trace.analysis.partition import partition, shares, split_waits
from syncline.trace.formats.imported import Imported, load
from syncline.trace.formats.json_stream import Limits
from syncline.trace.record.recorder import Recorder
from syncline.trace.record.recording import Recording
from syncline.trace.record.session import recording, start, stop
from syncline.trace.span import LANES, PHASES, Span

__all__ = [
    "LANES",
    "PHASES",
    "Analysis",
    "Imported",
    "Limits",
    "Recorder",
    "Recording",
    "Span",
    "analyze",
    "load",
    "overlap",
    "partition",
    "recording",
    "shares",
    "split_waits",
    "start",
    "stop",
]
