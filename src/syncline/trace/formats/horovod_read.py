"""Reads a Horovod timeline: rank 0's view, with one row per tensor.

Phases of a tensor are begin and end events; ticks tell when each rank was ready. A timeline has no steps: training
reduces every gradient once per step, so the n-th operation on a tensor belongs to step n.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any

from syncline.trace.formats.collective_names import collective, item_size
from syncline.trace.formats.trace_file import (
    RankTrace,
    Step,
    TraceFile,
    fields,
    rank_traces,
    step_at,
    text,
    times,
    whole,
)
from syncline.trace.span import STEP, Span
from syncline.wording import plural

KIND = "horovod"
"""The name of this format."""

_NEGOTIATE = "NEGOTIATE_"
_OPS = frozenset({"ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "ADASUM", "REDUCESCATTER", "JOIN", "BARRIER"})
_TRANSFER = re.compile(r"[A-Z]+_.*(?:ALLREDUCE|ALLGATHER|BCAST|BROADCAST|ALLTOALL|REDUCESCATTER|REDUCE)$")
_COPIES = {"MEMCPY_IN": "encode", "MEMCPY_OUT": "decode", "COPY_ALLGATHER_OUTPUT": "decode"}
_RANK = re.compile(r"rank (\d{1,6})", re.ASCII)
_SIZES = re.compile(r"\d{1,12}", re.ASCII)

_Track = tuple[int | str, int | str]
_Row = tuple[Span, int]
"""A span of the n-th operation on its tensor, and n; its step is negative if the timeline has none."""


def recognises(file: TraceFile, event: dict[str, Any]) -> bool:
    """Whether one event shows that Horovod wrote the file."""
    del file  # an array in most cases, but not where somebody has repaired it
    name = text(event.get("name"))
    begins = event.get("ph") == "B" and (name.startswith(_NEGOTIATE) or name in _OPS)
    return begins or name == "CYCLE_START" or "start_time_since_epoch_in_micros" in fields(event)


def read(file: TraceFile) -> list[RankTrace]:
    """Rank 0, and when the other ranks were ready and how long they waited then."""
    reader = _Reader(file)
    for event in file.events():
        reader.add(event)
    notes = [
        "a Horovod timeline is rank 0's view: it says of the other ranks only when they were ready",
        "it holds no compute and no steps: the n-th operation on a tensor is taken as step n",
    ]
    if reader.dropped:
        notes.append(f"{plural(reader.dropped, 'event')} without a begin, an end or a possible time: left out")
    if left := sum(len(stack) for stack in reader.open.values()):
        notes.append(f"{left} phases were still open at the end of the file and were left out")
    return rank_traces(file, _with_steps(reader.rows, reader.base), notes, absolute=reader.base > 0)


@dataclass
class _Frame:
    """An open phase: `inside` are the spans of finished phases within it, `ready` the ticks of ranks."""

    name: str
    start: int
    step: int
    bytes: int
    inside: list[Span] = field(default_factory=list)
    ready: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Reader:
    file: TraceFile
    rows: list[_Row] = field(default_factory=list)
    open: dict[_Track, list[_Frame]] = field(default_factory=dict)
    base: int = 0
    dropped: int = 0
    _tensors: dict[int | str, str] = field(default_factory=dict)
    _ranks: dict[_Track, int] = field(default_factory=dict)
    _turns: dict[_Track, int] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        """Process one event."""
        phase, row, thread = event.get("ph"), event.get("pid"), event.get("tid", 0)
        if not isinstance(row, int | str) or not isinstance(thread, int | str):
            return
        if phase == "M":
            self._metadata(event, row, thread)
        elif phase in ("B", "E", "X"):
            when = times(event)
            stack = self.open.get((row, thread), [])
            if when is None or (phase == "E" and not stack):
                self.dropped += 1
            elif phase == "B":
                self.file.keep()
                self.open[row, thread] = stack
                args = fields(event)
                step, size = whole(args.get("step")), whole(args.get("bytes"), 0)
                stack.append(_Frame(text(event.get("name")), when[0], step, size))
            elif phase == "X":
                self._tick(event, stack, when[0])
            else:
                self._end((row, thread), stack.pop(), when[0], fields(event))

    def _metadata(self, event: dict[str, Any], row: int | str, thread: int | str) -> None:
        args = fields(event)
        self.base = whole(args.get("start_time_since_epoch_in_micros"), self.base // 1000) * 1000
        name = text(args.get("name"))
        if event.get("name") == "process_name" and name:
            self.file.keep()
            self._tensors[row] = name
        elif event.get("name") == "thread_name" and (found := _RANK.match(name)):
            self.file.keep()
            self._ranks[row, thread] = int(found[1])

    def _tick(self, event: dict[str, Any], stack: list[_Frame], at: int) -> None:
        name = text(event.get("name"))
        if stack and stack[-1].name.startswith(_NEGOTIATE) and _SIZES.fullmatch(name):
            self.file.keep()
            stack[-1].ready.append((int(name), at))

    def _end(self, track: _Track, frame: _Frame, at: int, args: dict[str, Any]) -> None:
        if at < frame.start:
            self.dropped += 1
            return
        unit = self._tensors.get(track[0], text(str(track[0])))
        turn = self._turns.get(track, 0)
        span = Span(self._ranks.get(track, 0), "wait", frame.name, unit, frame.step, frame.start, at)
        transfer = replace(span, lane="exchange", name=collective(frame.name), bytes=frame.bytes)
        stack = self.open[track]
        if frame.name.startswith(_NEGOTIATE):
            # Each rank waits from its tick to the end of the negotiation.
            ready = frame.ready if track not in self._ranks else []
            waits = [replace(span, rank=rank, start=start) for rank, start in ready if start <= at]
            self.rows += [(wait, turn) for wait in (waits if ready else [span])]
        elif not stack:
            # Only the end of an operation has its size. Without inner phases the operation itself is the transfer.
            size = _bytes(args)
            self._turns[track] = turn + 1
            for one in frame.inside or [replace(transfer, bytes=0)]:
                self.rows.append((replace(one, bytes=one.bytes or size) if one.lane == "exchange" else one, turn))
        elif _TRANSFER.match(frame.name):
            stack[0].inside.append(transfer)
        else:
            lane = next((lane for start, lane in _COPIES.items() if frame.name.startswith(start)), "wait")
            stack[0].inside.append(replace(span, lane=lane))


def _bytes(args: dict[str, Any]) -> int:
    sizes = _SIZES.findall(text(args.get("shape")))[:16]
    return min(prod(int(size) for size in sizes) * item_size(args.get("dtype")), 1 << 62)


def _with_steps(rows: list[_Row], base: int) -> list[Span]:
    """The spans with their steps, times shifted by `base`, and a `step` span for every step of every rank.

    The n-th operation on a tensor is in step n if the tensor is reduced as often as any other (the last step may be
    cut off). Other tensors, such as a broadcast at the start or a metric at the end, are assigned by time.
    """
    numbers = _numbers(rows)
    spans = [span for span, _ in rows]
    steps = _bounds(spans, numbers)
    result = [
        Span(rank, STEP, STEP, "", number, base + start, base + end)
        for rank in sorted({span.rank for span in spans})
        for number, start, end in steps
    ]
    for span, step in zip(spans, numbers, strict=True):
        if step < 0:
            after = bool(steps) and span.start >= steps[-1][2]
            step = steps[-1][0] if after else max(0, step_at(steps, span.start))
        result.append(replace(span, step=step, start=base + span.start, end=base + span.end))
    return result


def _numbers(rows: list[_Row]) -> list[int]:
    """The step of each row; negative where it must be assigned by time."""
    turns: dict[str, int] = {}
    for span, turn in rows:
        turns[span.unit] = max(turn + 1, turns.get(span.unit, 0))
    most = max(turns.values(), default=0)
    once = {span.unit for span, _ in rows if span.name == "broadcast"}
    regular = {unit for unit, count in turns.items() if count >= max(1, most - 1) and unit not in once}
    return [span.step if span.step >= 0 else turn if span.unit in regular else -1 for span, turn in rows]


def _bounds(spans: list[Span], numbers: list[int]) -> list[Step]:
    """Each step lasts from its first span to the start of the next step."""
    starts: dict[int, int] = {}
    for span, number in zip(spans, numbers, strict=True):
        if number >= 0:
            starts[number] = min(span.start, starts.get(number, span.start))
    if not starts:
        starts = {0: min((span.start for span in spans), default=0)}
    end = max((span.end for span in spans), default=0)
    order = sorted(starts)
    begins = list(accumulate((starts[number] for number in order), max))
    ends = [*begins[1:], max(begins[-1], end)]
    return list(zip(order, begins, ends, strict=True))
