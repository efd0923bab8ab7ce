"""Traces of training: recording spans, loading and merging trace files, and analysing where the time goes.

`recording`, `start` and `stop` record; `load` reads a trace of ours or of other tools; `analyze` explains it.
"""

from syncline.trace.analysis.analyze import Analysis, analyze
from syncline.trace.analysis.overlap import overlap
from syncline.trace.analysis.timeline import partition, shares
from syncline.trace.formats.json_stream import Limits
from syncline.trace.formats.load import load
from syncline.trace.merge.exchanges import Exchange
from syncline.trace.merge.merge_ranks import Trace
from syncline.trace.record.flight_dump import dump_flight_recorder
from syncline.trace.record.recorder import Recorder
from syncline.trace.record.recording import Recording
from syncline.trace.record.session import recording, start, stop
from syncline.trace.span import LANES, PHASES, Span

__all__ = [
    "LANES",
    "PHASES",
    "Analysis",
    "Exchange",
    "Limits",
    "Recorder",
    "Recording",
    "Span",
    "Trace",
    "analyze",
    "dump_flight_recorder",
    "load",
    "overlap",
    "partition",
    "recording",
    "shares",
    "start",
    "stop",
]
