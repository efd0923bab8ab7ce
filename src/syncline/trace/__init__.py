"""What happened: spans, their partition of a step, and their export."""

from syncline.trace.partition import PHASES, partition, shares, split_waits
from syncline.trace.recorder import Recorder
from syncline.trace.span import LANES, Span

__all__ = ["LANES", "PHASES", "Recorder", "Span", "partition", "shares", "split_waits"]
