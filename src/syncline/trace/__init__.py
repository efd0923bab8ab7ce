"""What happened: spans, their partition of a step, their export, and the import of others' traces."""

from syncline.trace.imported import Imported, load
from syncline.trace.jsonstream import Limits
from syncline.trace.overlap import overlap
from syncline.trace.partition import PHASES, partition, shares, split_waits
from syncline.trace.recorder import Recorder
from syncline.trace.recording import Recording, recording, start, stop
from syncline.trace.span import LANES, Span

__all__ = [
    "LANES",
    "PHASES",
    "Imported",
    "Limits",
    "Recorder",
    "Recording",
    "Span",
    "load",
    "overlap",
    "partition",
    "recording",
    "shares",
    "split_waits",
    "start",
    "stop",
]
