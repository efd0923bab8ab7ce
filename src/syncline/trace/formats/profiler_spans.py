"""From the rows of a torch.profiler trace to spans: kernels take the lane of their launch, collectives are numbered."""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from syncline.trace.formats.profiler_lanes import Piece, Step, Thread, joined, step_at, thread_lanes, without
from syncline.trace.span import STEP, Span

_JOIN = 5_000  # what lies between two kernels of a busy stream; longer gaps of a GPU are idle time


class Collective(NamedTuple):
    """A collective where it ran: a range of a communication thread, or a kernel."""

    start: int
    end: int
    name: str
    bytes: int
    correlation: int = -1


class Kernel(NamedTuple):
    """A kernel, or with `copied` an input on its way to the GPU."""

    start: int
    end: int
    correlation: int
    copied: bool


@dataclass
class Rows:
    """What is kept of a trace: `launches` of kernels by correlation, `calls` of collectives by the training threads."""

    steps: list[tuple[Step, Thread]] = field(default_factory=list)
    host: dict[Thread, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    kernels: list[Kernel] = field(default_factory=list)
    launches: dict[int, tuple[Thread, int]] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    calls: dict[Thread, list[Collective]] = field(default_factory=lambda: defaultdict(list))


def spans_of(rows: Rows, *, rank: int, base: int) -> tuple[list[Span], list[str]]:
    """The rank's spans, shifted by `base` nanoseconds, and what was missing, in sentences."""
    notes: list[str] = []
    steps = _steps(rows, notes)
    if not steps:
        return [], ["it holds no work of a training loop: profile with ProfilerActivity.CPU, and CUDA on a GPU"]
    spans = [Span(rank, STEP, STEP, "", number, base + start, base + end) for number, start, end in steps]
    work = _work(rows, steps)
    spans += [Span(rank, p.kind, p.kind, "", p.step, base + p.start, base + p.end) for p in work if p.step >= 0]
    outside = sum(piece.step < 0 for piece in work)
    counted: dict[int, int] = defaultdict(int)
    for each in sorted(_collectives(rows, notes)):
        _, launched = rows.launches.get(each.correlation, (0, each.start))
        step = step_at(steps, launched, each.end)
        if step < 0:
            outside += 1
            continue
        unit = f"collective {counted[step]}"
        counted[step] += 1
        spans.append(Span(rank, "exchange", each.name, unit, step, base + each.start, base + each.end, each.bytes))
    if outside:
        notes.append(f"{outside} spans before its first or after its last step were left out")
    return spans, notes


def _steps(rows: Rows, notes: list[str]) -> list[Step]:
    steps = sorted({step[0]: step for step, _ in rows.steps}.values(), key=lambda step: step[1])
    if steps:
        return steps
    edges = [(piece.start, piece.end) for thread in rows.host.values() for piece in thread]
    edges += [(kernel.start, kernel.end) for kernel in rows.kernels]
    edges += [(each.start, each.end) for each in rows.collectives]
    if not edges:
        return []
    notes.append("it has no ProfilerStep ranges, so all of it is one step: call profiler.step() after every step")
    return [(0, min(start for start, _ in edges), max(end for _, end in edges))]


def _work(rows: Rows, steps: list[Step]) -> list[Piece]:
    """Data and compute: on a GPU the time of its kernels, otherwise the host's."""
    main = rows.steps[0][1] if rows.steps else max(rows.host, key=lambda t: len(rows.host[t]), default=0)
    lanes = {t: thread_lanes(pieces, steps, training=t == main) for t, pieces in rows.host.items()}
    if rows.kernels:
        return [p for p in lanes.get(main, []) if p.kind == "data"] + _kernels(rows, lanes, steps)
    # A call of a collective is no compute: where it blocks, the exchange is exposed.
    return [
        piece
        for thread, pieces in lanes.items()
        for piece in without(pieces, [(call.start, call.end) for call in rows.calls.get(thread, [])])
    ]


def _kernels(rows: Rows, lanes: dict[Thread, list[Piece]], steps: list[Step]) -> list[Piece]:
    by_lane: dict[str, list[Piece]] = defaultdict(list)
    starts = {thread: [piece.start for piece in pieces] for thread, pieces in lanes.items()}
    for kernel in sorted(rows.kernels):
        thread, launched = rows.launches.get(kernel.correlation, (0, kernel.start))
        step = step_at(steps, launched, kernel.end)
        # Without an op around its launch (a kernel from Python) it continues what its thread did before.
        place = bisect_right(starts.get(thread, []), launched) - 1
        before = lanes[thread][place] if place >= 0 else None
        lane = before.kind if before is not None and before.step == step else "forward"
        if kernel.copied and lane == "forward":
            lane = "data"
        by_lane[lane].append(Piece(kernel.start, kernel.end, lane, step))
    return [piece for pieces in by_lane.values() for piece in joined(pieces, _JOIN)]


def _collectives(rows: Rows, notes: list[str]) -> list[Collective]:
    found = rows.collectives
    if not found and any(rows.calls.values()):
        notes.append(
            "of its collectives it has the calls only, which may return before the transfer ends:"
            " profile with ProfilerActivity.CUDA, or use the gloo backend on the CPU"
        )
        found = [call for calls in rows.calls.values() for call in _not_nested(calls)]
    if not found:
        notes.append("it holds no collectives")
    elif not any(each.bytes for each in found):
        notes.append("it does not say how large its messages are: profile with record_shapes=True")
    return found


def _not_nested(calls: list[Collective]) -> list[Collective]:
    result: list[Collective] = []
    for call in sorted(calls, key=lambda c: (c.start, -c.end)):
        if not result or call.start >= result[-1].end:
            result.append(call)
    return result
