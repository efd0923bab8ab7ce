"""The span, the one record of time, with the names of lanes, phases and process groups that all of `trace` uses."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

LANES = ("data", "forward", "backward", "encode", "exchange", "decode", "update", "between", "wait")
"""Kinds of work of a rank. Each span belongs to one of them, or to `STEP`."""

COMPUTE_LANES = ("forward", "backward", "update")
"""Lanes of compute, which can hide an exchange or a codec."""

TRAINING_LANES = ("data", *COMPUTE_LANES, "between")
"""Lanes of the training thread's own work. The phases of the same names count its time there."""

STEP = "step"
"""The lane of spans that cover a whole step."""

BLOCKED = "blocked"
"""The name of `wait` spans in which the training thread was blocked. They are cut out of its compute spans."""

ISSUING = "issuing"
"""The name of `wait` spans in which the training thread packed, started or unpacked a message; cut out as well."""

THREAD_WAITS = (BLOCKED, ISSUING)
"""Names of `wait` spans of the training thread. All others are waits of an exchange for its last rank."""

STAGES = "messages of stages"
"""The unit of `BLOCKED` spans in which a stage of a pipeline waits for messages of other stages."""

POINT_TO_POINT = "point-to-point"
"""The name of exchanges of two ranks of which one sends and one receives, such as those of a pipeline's stages."""

PHASES = ("data", "forward", "backward", "exposed_encode", "exposed_exchange", "wait", "update", "between", "other")
"""Categories of the training thread's time. The phases of a step sum to its wall time."""

MAX_TIME_NS = 1 << 62
"""Limit of times that are read from files: more than a century in nanoseconds."""
MAX_COUNT = 1 << 53
"""Limit of steps and bytes that are read from files: JSON numbers are exact up to here."""
_ROW_TYPES = [str, str, str, int, int, int, int]
_LONG_ROW_TYPES = [*_ROW_TYPES, str, str]


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
    group: str = ""
    """The process group of an exchange (`group_label`); empty for all ranks, and where it is unknown."""
    stream: str = ""
    """The stream of the device that did the work; empty for work of the host, and where it is unknown."""

    def to_row(self) -> list[Any]:
        """The span without its rank as plain values, for files and messages that hold the spans of one rank."""
        row = [self.lane, self.name, self.unit, self.step, self.start, self.end, self.bytes]
        return [*row, self.group, self.stream] if self.group or self.stream else row

    @classmethod
    def from_row(cls, rank: int, row: Sequence[Any]) -> "Span":
        """The span that `to_row` wrote, from a source that we trust."""
        return cls(rank, *row)

    @classmethod
    def from_untrusted_row(cls, rank: int, row: Any) -> "Span":
        """The same for a file that may hold anything; `ValueError` says what is wrong."""
        if not isinstance(row, list) or [type(value) for value in row] not in (_ROW_TYPES, _LONG_ROW_TYPES):
            raise ValueError("a value is missing or has the wrong type")
        lane, _, _, step, start, end, size = row[: len(_ROW_TYPES)]
        if lane not in LANES and lane != STEP:
            raise ValueError("unknown lane")
        if not -MAX_TIME_NS < start <= end < MAX_TIME_NS:
            raise ValueError("the end is before the start, or a time is out of range")
        if not -MAX_COUNT < step < MAX_COUNT or not 0 <= size < MAX_COUNT:
            raise ValueError("the step or the number of bytes is out of range")
        return cls(rank, *row)


def is_copy_name(name: str) -> bool:
    """Whether this is the name of a GPU's copy or fill."""
    return name.startswith(("Memcpy", "Memset"))


def is_copy(span: Span) -> bool:
    """Whether a GPU copied or filled memory here, which is not compute."""
    return is_copy_name(span.name)


def device_track(span: Span) -> str:
    """The process group and the stream of a span, as the name of its track in a lane; empty where both are unknown.

    >>> device_track(Span(0, "exchange", "all-reduce", "", 0, 0, 1, group="tp", stream="20"))
    'group tp, stream 20'
    """
    return ", ".join(f"{what} {name}" for what, name in (("group", span.group), ("stream", span.stream)) if name)


def track_order(track: str) -> list[tuple[int, str]]:
    """A key that sorts tracks by their names, with numbers in them by value.

    >>> sorted(["stream 13", "stream 7"], key=track_order)
    ['stream 7', 'stream 13']
    """
    return [
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in re.split(r"(\d+)", track)
    ]


def group_label(name: str, ranks: Sequence[int]) -> str:
    """The name of a process group that no other group of the job has: groups of a mesh may share their own names.

    >>> group_label("dp", [0, 1, 2, 8])
    'dp (ranks 0-2, 8)'
    """
    return f"{name} (ranks {rank_list(ranks)})"


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks as text, with consecutive ones as a range.

    >>> rank_list([3, 0, 1, 5, 6, 7])
    '0-1, 3, 5-7'
    """
    ordered = sorted(set(ranks))
    parts = []
    for _, pairs in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)
