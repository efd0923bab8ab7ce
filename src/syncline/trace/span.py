"""The span: the one record of everything that speaks of time."""

from dataclasses import dataclass

LANES = ("data", "forward", "backward", "encode", "exchange", "decode", "update", "wait")
"""What a rank can be doing."""

STEP = "step"
"""Brackets a whole step; no lane of work."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one rank. Times are nanoseconds of the host's monotonic clock."""

    rank: int
    lane: str
    name: str
    unit: str
    step: int
    start: int
    end: int
    bytes: int = 0
