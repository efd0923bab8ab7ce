"""Spans as Horovod's timeline shows them: a row a tensor, with Horovod's names for what happens to it.

Horovod's rank 0 writes its own view; here every rank has a thread in each tensor's row.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from syncline.trace.formats.chrome_events import Event, micros, names, slots
from syncline.trace.span import BLOCKED, STEP, Span

PACK, UNPACK, QUEUE = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER", "QUEUE"
_TENSOR_LANES = frozenset({"encode", "exchange", "decode", "wait"})
_CYCLES = 0  # the row of what is no tensor's


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of a tensor's way; `outer` is Horovod's name of the operation around it, empty around a negotiation."""

    start: int
    end: int
    name: str
    outer: str
    step: int
    args: Mapping[str, int]


def horovod_trace(spans: Iterable[Span], *, backend: str = "gloo") -> list[Event]:
    """The trace as the JSON array that Horovod writes; `spans` are those that `split_waits` returns.

    A wait becomes NEGOTIATE_<OP> with a tick for every rank that comes meanwhile, encode and decode the copies into and
    out of the fusion buffer, the transfer <BACKEND>_<OP>, and the time from encode to exchange QUEUE.
    """
    spans = sorted(spans, key=lambda s: (s.start, s.end))
    origin = spans[0].start if spans else 0
    joined = _joined(spans)
    units: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.lane in _TENSOR_LANES and span.name != BLOCKED:
            units[span.unit or span.name][span.rank].append(span)
    named = names(_CYCLES, "steps", [])
    timed: list[tuple[int, Event]] = []
    for pid, unit in enumerate(units, start=_CYCLES + 1):
        labels: list[str] = []
        for rank in sorted(units[unit]):
            phases = _phases(units[unit][rank], backend.upper())
            tracks = slots((phase.start, phase.end) for phase in phases)
            for slot in range(max(tracks) + 1):
                labels.append(f"rank {rank}" if slot == 0 else f"rank {rank} ({slot + 1})")
                mine = [phase for phase, track in zip(phases, tracks, strict=True) if track == slot]
                timed += _track(mine, joined, unit, pid, len(labels))
        named += names(pid, unit, enumerate(labels, start=1))
    first = min((s.rank for s in spans), default=0)
    timed += [(s.start, _cycle(s.step)) for s in spans if s.lane == STEP and s.rank == first]
    timed.sort(key=lambda pair: pair[0])
    for at, event in timed:
        event["ts"] = micros(at - origin)
    return [*named, *(event for _, event in timed)]


def operation(name: str) -> str:
    """Horovod's way to write an exchange's name.

    >>> operation("all-reduce"), operation("sharded(parts=2)")
    ('ALLREDUCE', 'SHARDED')
    """
    return re.sub(r"[^A-Za-z0-9]", "", name.partition("(")[0]).upper() or "EXCHANGE"


def _phases(spans: Sequence[Span], backend: str) -> list[_Phase]:
    """The phases of a tensor on one rank, in the order of their starts."""
    found: list[_Phase] = []
    for _, course in groupby(sorted(spans, key=lambda s: s.step), key=lambda s: s.step):
        found += _course(list(course), backend)
    return sorted(found, key=lambda phase: (phase.start, phase.end))


def _course(spans: Sequence[Span], backend: str) -> list[_Phase]:
    exchanges = [span.name for span in spans if span.lane in ("exchange", "wait")]
    # What a copy belongs to: the exchange behind it, else the one before it.
    outer = operation(exchanges[0]) if exchanges else operation("")
    found = []
    for i, span in enumerate(spans):
        args = {"step": span.step}
        if span.lane in ("exchange", "wait"):
            outer = operation(span.name)
        if span.lane == "wait":
            found.append(_Phase(span.start, span.end, f"NEGOTIATE_{outer}", "", span.step, args))
        elif span.lane == "exchange":
            args["bytes"] = span.bytes
            found.append(_Phase(span.start, span.end, f"{backend}_{outer}", outer, span.step, args))
        else:
            name = PACK if span.lane == "encode" else UNPACK
            found.append(_Phase(span.start, span.end, name, outer, span.step, args))
        follows = next((s for s in spans[i + 1 : i + 2] if s.lane in ("exchange", "wait")), None)
        if span.lane == "encode" and follows is not None and follows.start > span.end:
            found.append(_Phase(span.end, follows.start, QUEUE, outer, span.step, {"step": span.step}))
    return found


def _track(
    phases: Sequence[_Phase], joined: Mapping[Any, Sequence[tuple[int, int]]], unit: str, pid: int, tid: int
) -> list[tuple[int, Event]]:
    """Begin and end events of phases that do not overlap; an operation lasts until a gap or a negotiation."""
    timed: list[tuple[int, Event]] = []
    where = {"pid": pid, "tid": tid}

    def begin(at: int, name: str, args: Mapping[str, int]) -> None:
        timed.append((at, {"ph": "B", "name": name, **where, "args": dict(args)}))

    def end(at: int) -> None:
        timed.append((at, {"ph": "E", **where}))

    for members in _runs(phases):
        step, outer = members[0].step, members[0].outer
        if outer:
            begin(members[0].start, outer, {"step": step})
        for phase in members:
            begin(phase.start, phase.name, phase.args)
            for at, rank in () if outer else joined[unit, step, phase.name.removeprefix("NEGOTIATE_")]:
                if phase.start <= at <= phase.end:
                    timed.append((at, {"ph": "X", "name": str(rank), **where, "dur": 0}))
            end(phase.end)
        if outer:
            end(members[-1].end)
    return timed


def _runs(phases: Sequence[_Phase]) -> list[list[_Phase]]:
    """Phases of one operation without a gap between them; where there is one, the next is an operation by itself."""
    runs: list[list[_Phase]] = []
    for phase in phases:
        last = runs[-1][-1] if runs else None
        same = last is not None and (last.step, last.outer, last.end) == (phase.step, phase.outer, phase.start)
        if same and phase.outer:
            runs[-1].append(phase)
        else:
            runs.append([phase])
    return runs


def _joined(spans: Iterable[Span]) -> Mapping[Any, Sequence[tuple[int, int]]]:
    """For each exchange the moments at which ranks came to it, in their order, with the rank."""
    came: dict[tuple[str, int, str], list[tuple[int, int]]] = defaultdict(list)
    begun: set[tuple[int, str, int, str, int]] = set()
    for span in spans:
        if span.lane not in ("exchange", "wait") or span.name == BLOCKED:
            continue
        unit, name = span.unit or span.name, operation(span.name)
        if span.lane == "wait":
            begun.add((span.rank, unit, span.step, name, span.end))
        elif (span.rank, unit, span.step, name, span.start) in begun:
            continue  # it came when its wait began
        came[unit, span.step, name].append((span.start, span.rank))
    return came


def _cycle(step: int) -> Event:
    return {"ph": "i", "name": "CYCLE_START", "s": "g", "pid": _CYCLES, "tid": 0, "args": {"step": step}}
