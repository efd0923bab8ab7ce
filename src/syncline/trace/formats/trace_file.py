"""A trace file, plain or gzip: its events one at a time, its header, and whether it is cut off."""

import gzip
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.files import open_regular, reason
from syncline.trace.formats.json_stream import COMMAS, CUT, Limits, Window
from syncline.trace.gpu_activity import GpuActivity
from syncline.trace.span import Span
from syncline.wording import plural

_HEADER_BYTES = 1 << 22  # a header may list every process group with its ranks: larger than any event
# Other keys are skipped: a hostile file could hold any number of them.
_KEPT = frozenset({"schemaVersion", "distributedInfo", "baseTimeNanoseconds", "host_name", "otherData"})

_RANK = re.compile(r"(?:rank|worker|^r)[-_. ]?(\d{1,6})", re.IGNORECASE | re.ASCII)

Step = tuple[int, int, int]
"""A step's number, start and end."""


@dataclass
class TraceFile:
    """One file being read: `events()` yields its events and fills in the other fields meanwhile.

    `array`: the file is a bare array, as Horovod writes it. `cut`: how the file stopped before its end, if it did.
    `count`, `odd`: the number of entries, and of those that are not objects. `kept`: the records in memory.
    """

    path: Path
    limits: Limits = field(default_factory=Limits)
    header: dict[str, Any] = field(default_factory=dict)
    array: bool = False
    cut: str = ""
    count: int = 0
    odd: int = 0
    kept: int = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """The events, in the file's order.

        `UsageError` for text that is not JSON and for a file that exceeds a limit. A file that stops early gives its
        events up to there, and sets `cut`.
        """
        try:
            with open_regular(self.path) as raw:
                packed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                # By content, not by name: a wrong file name would give a confusing error.
                with gzip.GzipFile(fileobj=raw, mode="rb") if packed else raw as data:
                    yield from self._read(Window(self.path, data, self.limits))
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {reason(error)}") from None

    def keep(self) -> None:
        """Count a record that stays in memory; `UsageError` if there are too many."""
        self.kept += 1
        if self.kept > self.limits.spans:
            raise self.limits.exceeded(self.path, "spans", "more than {} spans")

    def _read(self, window: Window) -> Iterator[dict[str, Any]]:
        first = window.peek()
        if first in ("[", "{"):
            self.array = first == "["
            yield from self._array(window) if self.array else self._object(window)
            if not self.cut:
                window.check_rest()
        elif first == "" and window.damage:
            raise UsageError(f"{self.path} cannot be decompressed ({window.damage}): copy or export it again")
        elif first == "":
            raise UsageError(f"{self.path} is empty: export the trace again")
        else:
            raise UsageError(f"{self.path} is not a trace: it starts with {first!r}, not with '{{' or '['")

    def _object(self, window: Window) -> Iterator[dict[str, Any]]:
        window.take()
        longest = max(_HEADER_BYTES, self.limits.event_bytes)
        while (mark := window.peek(COMMAS)) not in ("}", ""):
            key = window.value(longest)
            if key is CUT or (mark := window.take()) == "":
                break
            if not isinstance(key, str) or mark != ":":
                raise window.broken()
            if key == "traceEvents" and window.peek() == "[":
                yield from self._array(window)
                if self.cut:
                    return
                continue
            value = window.value(longest)
            if value is CUT:
                break
            if key in _KEPT:
                self.header[key] = value
        if mark != "}":
            self.cut = window.ending("in its header")

    def _array(self, window: Window) -> Iterator[dict[str, Any]]:
        window.take()
        while (mark := window.peek(COMMAS)) != "]":
            event = window.value(self.limits.event_bytes) if mark else CUT
            if event is CUT:
                self.cut = window.ending(f"after {plural(self.count, 'event')}")
                return
            self.count += 1
            if self.count > self.limits.events:
                raise self.limits.exceeded(self.path, "events", "more than {} events")
            if isinstance(event, dict):
                yield event
            else:
                self.odd += 1
        window.take()


@dataclass
class RankTrace:
    """What one file says about one rank; `rank` is negative and `world` 0 where the file does not say.

    `absolute`: the times are on a clock that other files share.
    """

    path: Path
    rank: int
    spans: list[Span]
    notes: list[str] = field(default_factory=list)
    world: int = 0
    host: str = ""
    pid: str = ""
    absolute: bool = False
    sequences: dict[tuple[int, int, str], int] = field(default_factory=dict)
    """By start, end and group of a collective: its number in the group, where the file has it."""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and ranks of the process groups that this rank is in, as far as the file says."""
    gpu: GpuActivity | None = None
    """What its GPU waited for, if the file shows one."""
    operators: list[list[Any]] = field(default_factory=list)
    """Rows of step, operator and nanoseconds of the host, if the file has them and no kernels."""

    def renumber(self, shift: int) -> None:
        """Add this number to the number of every step."""
        self.spans = [replace(span, step=span.step + shift) for span in self.spans]
        self.operators = [[step + shift, *rest] for step, *rest in self.operators]
        if self.gpu is not None:
            idle = tuple(replace(row, step=row.step + shift) for row in self.gpu.idle)
            blocked = tuple(replace(row, step=row.step + shift) for row in self.gpu.blocked)
            self.gpu = replace(self.gpu, idle=idle, blocked=blocked)


def rank_traces(file: TraceFile, spans: Iterable[Span], notes: list[str], *, absolute: bool = False) -> list[RankTrace]:
    """One `RankTrace` per rank of a file that holds several; the notes go to the first."""
    ranks: dict[int, list[Span]] = {}
    for span in spans:
        ranks.setdefault(span.rank, []).append(span)
    return [
        RankTrace(file.path, rank, ranks[rank], notes if number == 0 else [], absolute=absolute)
        for number, rank in enumerate(sorted(ranks))
    ]


def step_at(steps: list[Step], time: int) -> int:
    """The number of the step that this time belongs to; between two steps the earlier, -1 outside all of them.

    What starts (or is launched) before the first step does not belong to it, even if it ends inside.
    """
    place = bisect_right(steps, time, key=lambda step: step[1]) - 1
    return -1 if place < 0 or (place == len(steps) - 1 and time >= steps[-1][2]) else steps[place][0]


def times(event: dict[str, Any]) -> tuple[int, int] | None:
    """Start and end of an event in nanoseconds, or None where they are missing or impossible."""
    start, length = event.get("ts"), event.get("dur", 0)
    if not (isinstance(start, int | float) and isinstance(length, int | float)):
        return None
    # Far beyond any clock's microseconds, and still exact to the microsecond.
    if not (-1e16 < start < 1e16 and 0 <= length < 1e16):
        return None
    begin = round(start * 1000)
    return begin, begin + round(length * 1000)


def rank_in_name(path: Path) -> int | None:
    """The rank that the name of a file says; None where it says none.

    >>> rank_in_name(Path("dumps/comm_lib_trace_rank_3")), rank_in_name(Path("trace.json"))
    (3, None)
    """
    found = _RANK.search(path.name)
    return int(found[1]) if found else None


def text(value: object, default: str = "") -> str:
    """A name as it is kept: a string of at most 200 characters, each stored once."""
    return sys.intern(value[:200]) if isinstance(value, str) else default


def whole(value: object, default: int = -1) -> int:
    """A count or an index: a non-negative integer of at most 62 bits, else `default`."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else default


def fields(event: dict[str, Any]) -> dict[str, Any]:
    """The event's `args`, empty where it has none."""
    args = event.get("args")
    return args if isinstance(args, dict) else {}
