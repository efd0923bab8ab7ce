"""Reads a Horovod timeline: rank 0's view, a row a tensor, phases as begin and end events, ticks of ranks."""

import re
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from syncline.trace.formats.collective_names import collective, item_size
from syncline.trace.formats.horovod_steps import Row, stepped
from syncline.trace.formats.trace_file import RankTrace, TraceFile, fields, text, times, whole
from syncline.trace.span import Span

KIND = "horovod"
"""The name of this kind of trace."""

_NEGOTIATE = "NEGOTIATE_"
_OPS = frozenset({"ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "ADASUM", "REDUCESCATTER", "JOIN", "BARRIER"})
_TRANSFER = re.compile(r"[A-Z]+_.*(?:ALLREDUCE|ALLGATHER|BCAST|BROADCAST|ALLTOALL|REDUCESCATTER|REDUCE)$")
_COPIES = {"MEMCPY_IN": "encode", "MEMCPY_OUT": "decode", "COPY_ALLGATHER_OUTPUT": "decode"}
_RANK = re.compile(r"rank (\d{1,6})", re.ASCII)
_SIZES = re.compile(r"\d{1,12}", re.ASCII)

_Track = tuple[int | str, int | str]


def recognises(file: TraceFile, event: dict[str, Any]) -> bool:
    """Whether the file looks like Horovod's, from one event."""
    del file  # an array in most cases, but not where somebody has mended it
    name = text(event.get("name"))
    begins = event.get("ph") == "B" and (name.startswith(_NEGOTIATE) or name in _OPS)
    return begins or name == "CYCLE_START" or "start_time_since_epoch_in_micros" in fields(event)


def read(file: TraceFile) -> list[RankTrace]:
    """Rank 0, and of the others when they were ready and how long they waited then."""
    reader = _Reader(file)
    for event in file.events():
        reader.add(event)
    spans = stepped(reader.rows, reader.base)
    notes = [
        "a Horovod timeline is rank 0's view: of the other ranks it has only when they were ready",
        "it holds no compute and no steps: the n-th operation on a tensor is taken as step n",
    ]
    if reader.dropped:
        notes.append(f"{reader.dropped} events without a beginning, an end or a sane time were left out")
    if left := sum(len(stack) for stack in reader.open.values()):
        notes.append(f"{left} phases were still open where it ends and were left out")
    ranks: dict[int, list[Span]] = {}
    for span in spans:
        ranks.setdefault(span.rank, []).append(span)
    return [
        RankTrace(file.path, rank, ranks[rank], notes if i == 0 else [], absolute=reader.base > 0)
        for i, rank in enumerate(sorted(ranks))
    ]


@dataclass
class _Frame:
    """A phase that has begun; `inside` are the finished ones within it, `ready` the ranks' ticks."""

    name: str
    start: int
    step: int
    bytes: int
    inside: list[Row] = field(default_factory=list)
    ready: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Reader:
    file: TraceFile
    rows: list[Row] = field(default_factory=list)
    open: dict[_Track, list[_Frame]] = field(default_factory=dict)
    base: int = 0
    dropped: int = 0
    _kept: int = 0
    _tensors: dict[int | str, str] = field(default_factory=dict)
    _ranks: dict[_Track, int] = field(default_factory=dict)
    _turns: dict[_Track, int] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        """Sort one event in."""
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
                self._keep()
                self.open[row, thread] = stack
                args = fields(event)
                step, size = whole(args.get("step")), whole(args.get("bytes"), 0)
                stack.append(_Frame(text(event.get("name")), when[0], step, size))
            elif phase == "X":
                self._tick(event, stack, when[0])
            else:
                self._end((row, thread), stack.pop(), when[0], fields(event))

    def _keep(self) -> None:
        self._kept += 1
        if self._kept > self.file.limits.spans:
            raise self.file.too_many("spans")

    def _metadata(self, event: dict[str, Any], row: int | str, thread: int | str) -> None:
        args = fields(event)
        self.base = whole(args.get("start_time_since_epoch_in_micros"), self.base // 1000) * 1000
        name = text(args.get("name"))
        if event.get("name") == "process_name" and name:
            self._keep()
            self._tensors[row] = name
        elif event.get("name") == "thread_name" and (found := _RANK.match(name)):
            self._keep()
            self._ranks[row, thread] = int(found[1])

    def _tick(self, event: dict[str, Any], stack: list[_Frame], at: int) -> None:
        name = text(event.get("name"))
        if stack and stack[-1].name.startswith(_NEGOTIATE) and _SIZES.fullmatch(name):
            self._keep()
            stack[-1].ready.append((int(name), at))

    def _end(self, track: _Track, frame: _Frame, at: int, args: dict[str, Any]) -> None:
        if at < frame.start:
            self.dropped += 1
            return
        unit = self._tensors.get(track[0], text(str(track[0])))
        turn = self._turns.get(track, 0)
        row = Row(self._ranks.get(track, 0), "wait", frame.name, unit, frame.start, at, 0, frame.step, turn)
        stack = self.open[track]
        if frame.name.startswith(_NEGOTIATE):
            self.rows += self._waits(track, frame, row)
        elif not stack:
            # Only the end of an operation says how large it was. Without phases inside it is a transfer by itself.
            inside = frame.inside or [replace(row, lane="exchange", name=collective(frame.name))]
            size = _bytes(args)
            self._turns[track] = turn + 1
            self.rows += [replace(r, bytes=r.bytes or size) if r.lane == "exchange" else r for r in inside]
        elif _TRANSFER.match(frame.name):
            stack[0].inside.append(replace(row, lane="exchange", name=collective(frame.name), bytes=frame.bytes))
        else:
            lane = next((lane for start, lane in _COPIES.items() if frame.name.startswith(start)), "wait")
            stack[0].inside.append(replace(row, lane=lane))

    def _waits(self, track: _Track, frame: _Frame, row: Row) -> list[Row]:
        """A rank waits from its tick to the end of the negotiation: the last one hardly at all."""
        if track in self._ranks or not frame.ready:
            return [row]
        return [replace(row, rank=rank, start=at) for rank, at in frame.ready if at <= row.end]


def _bytes(args: dict[str, Any]) -> int:
    sizes = _SIZES.findall(text(args.get("shape")))[:16]
    return min(prod(int(size) for size in sizes) * item_size(args.get("dtype")), 1 << 62)
