"""Writes a trace in the format of Horovod's timeline: one row per tensor, with Horovod's names for its phases.

Horovod's rank 0 writes its own view; here every rank has a thread in each tensor's row.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from syncline.trace.formats.chrome_events import Event, micros, names, slots
from syncline.trace.merge.exchanges import Exchange
from syncline.trace.merge.merge_ranks import Trace
from syncline.trace.span import STEP, THREAD_WAITS, Span

PACK, UNPACK, QUEUE = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER", "QUEUE"
_EXCHANGE_LANES = ("exchange", "wait")
_TENSOR_LANES = frozenset({"encode", "decode", *_EXCHANGE_LANES})
_CYCLES = 0  # the row for marks that belong to no tensor
_Operation = tuple[str, int, str]  # unit, step, Horovod's name of the operation


@dataclass(frozen=True, slots=True)
class _Phase:
    """One phase of a tensor; `outer` is Horovod's name of the operation around it, empty for a negotiation."""

    start: int
    end: int
    name: str
    outer: str
    step: int
    bytes: int | None = None


def horovod_trace(trace: Trace, *, backend: str = "gloo") -> list[Event]:
    """The trace as the JSON array that Horovod writes.

    A wait for a late rank becomes NEGOTIATE_<OP>, with a tick for every rank that joins meanwhile. Encode and decode
    become the copies into and out of the fusion buffer, the transfer becomes <BACKEND>_<OP>, and the time from encode
    to exchange becomes QUEUE.
    """
    spans = sorted(trace.spans, key=lambda s: (s.start, s.end))
    origin = spans[0].start if spans else 0
    joined = _joined(trace.exchanges)
    units: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.lane in _TENSOR_LANES and span.name not in THREAD_WAITS:
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
    mark = {"ph": "i", "name": "CYCLE_START", "s": "g", "pid": _CYCLES, "tid": 0}
    timed += [(s.start, {**mark, "args": {"step": s.step}}) for s in spans if s.lane == STEP and s.rank == first]
    timed.sort(key=lambda pair: pair[0])
    for at, event in timed:
        event["ts"] = micros(at - origin)
    return [*named, *(event for _, event in timed)]


def operation(name: str) -> str:
    """An exchange's name as Horovod writes it.

    >>> operation("all-reduce"), operation("sharded(parts=2)")
    ('ALLREDUCE', 'SHARDED')
    """
    return re.sub(r"[^A-Za-z0-9]", "", name.partition("(")[0]).upper() or "EXCHANGE"


def _phases(spans: Sequence[Span], backend: str) -> list[_Phase]:
    """The phases of a tensor on one rank, in the order of their starts."""
    found: list[_Phase] = []
    for _, of_step in groupby(sorted(spans, key=lambda s: s.step), key=lambda s: s.step):
        found += _phases_of_step(list(of_step), backend)
    return sorted(found, key=lambda phase: (phase.start, phase.end))


def _phases_of_step(spans: Sequence[Span], backend: str) -> list[_Phase]:
    exchanges = [span.name for span in spans if span.lane in _EXCHANGE_LANES]
    # A copy belongs to the exchange after it, else to the one before it.
    outer = operation(exchanges[0]) if exchanges else operation("")
    found = []
    for span, following in zip_longest(spans, spans[1:]):
        if span.lane in _EXCHANGE_LANES:
            outer = operation(span.name)
        name = {"wait": f"NEGOTIATE_{outer}", "exchange": f"{backend}_{outer}", "encode": PACK, "decode": UNPACK}
        around = "" if span.lane == "wait" else outer
        size = span.bytes if span.lane == "exchange" else None
        found.append(_Phase(span.start, span.end, name[span.lane], around, span.step, size))
        queues = span.lane == "encode" and following is not None and following.lane in _EXCHANGE_LANES
        if queues and following.start > span.end:
            found.append(_Phase(span.end, following.start, QUEUE, outer, span.step))
    return found


def _track(
    phases: Sequence[_Phase], joined: Mapping[_Operation, Sequence[tuple[int, int]]], unit: str, pid: int, tid: int
) -> list[tuple[int, Event]]:
    """Begin and end events of phases that do not overlap; an operation lasts until a gap or a negotiation."""
    timed: list[tuple[int, Event]] = []
    where = {"pid": pid, "tid": tid}

    def begin(at: int, name: str, args: Mapping[str, int]) -> None:
        timed.append((at, {"ph": "B", "name": name, **where, "args": args}))

    def end(at: int) -> None:
        timed.append((at, {"ph": "E", **where}))

    for members in _runs(phases):
        step, outer = members[0].step, members[0].outer
        if outer:
            begin(members[0].start, outer, {"step": step})
        for phase in members:
            begin(phase.start, phase.name, {"step": step} | ({} if phase.bytes is None else {"bytes": phase.bytes}))
            for at, rank in () if outer else joined.get((unit, step, phase.name.removeprefix("NEGOTIATE_")), ()):
                if phase.start <= at <= phase.end:
                    timed.append((at, {"ph": "X", "name": str(rank), **where, "dur": 0}))
            end(phase.end)
        if outer:
            end(members[-1].end)
    return timed


def _runs(phases: Sequence[_Phase]) -> list[list[_Phase]]:
    """Groups of phases of one operation without a gap between them; after a gap a new operation begins."""
    runs: list[list[_Phase]] = []
    for phase in phases:
        last = runs[-1][-1] if runs else None
        same = last is not None and (last.step, last.outer, last.end) == (phase.step, phase.outer, phase.start)
        if same and phase.outer:
            runs[-1].append(phase)
        else:
            runs.append([phase])
    return runs


def _joined(exchanges: Iterable[Exchange]) -> Mapping[_Operation, Sequence[tuple[int, int]]]:
    """By unit, step and operation: when each rank joined, and the rank, in the order of time."""
    joined: dict[_Operation, list[tuple[int, int]]] = defaultdict(list)
    for exchange in exchanges:
        key = (exchange.unit or exchange.name, exchange.step, operation(exchange.name))
        joined[key] += [(member.joined, member.rank) for member in exchange.members]
    return {key: sorted(ranks) for key, ranks in joined.items()}
