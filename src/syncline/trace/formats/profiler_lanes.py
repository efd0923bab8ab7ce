"""The threads of a torch.profiler trace as lanes: outermost ranges and ops, each given to a lane and a step."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

_JOIN = 500_000  # ops of a lane closer than this, with nothing between, are one span: Python runs between them

Thread = int | str
"""How a trace names a thread."""

Step = tuple[int, int, int]
"""A step's number, start and end."""


class Piece(NamedTuple):
    """A stretch of work of a thread.

    `kind` is a lane; before `thread_lanes` also `op` (an op of any lane) or `finish` (DDP's copies after its backward).
    """

    start: int
    end: int
    kind: str
    step: int = -1


def step_at(steps: list[Step], start: int, end: int) -> int:
    """The step that a stretch of time belongs to, the earlier one between two steps; -1 outside all of them."""
    place = bisect_right(steps, start, key=lambda step: step[1]) - 1
    if place < 0:
        return steps[0][0] if steps and end > steps[0][1] else -1
    return -1 if place == len(steps) - 1 and start >= steps[-1][2] else steps[place][0]


def thread_lanes(pieces: Iterable[Piece], steps: list[Step], *, training: bool) -> list[Piece]:
    """A thread's lanes, in order. A thread that does not run the training loop counts with its backward work only."""
    outermost = [piece._replace(step=step_at(steps, piece.start, piece.end)) for piece in _outermost(pieces)]
    if training:
        return joined(_placed(outermost), _JOIN)
    own = ("backward", "finish")
    return joined([piece._replace(kind="backward") for piece in outermost if piece.kind in own], _JOIN)


def joined(pieces: Iterable[Piece], gap: int) -> list[Piece]:
    """Join neighbours of one lane and step that are at most `gap` apart; `pieces` are sorted by start."""
    result: list[Piece] = []
    for piece in pieces:
        before = result[-1] if result else None
        same = before is not None and (before.kind, before.step) == (piece.kind, piece.step)
        if before is not None and same and piece.start - before.end <= gap:
            result[-1] = before._replace(end=max(before.end, piece.end))
        else:
            result.append(piece)
    return result


def without(pieces: list[Piece], holes: Iterable[tuple[int, int]]) -> list[Piece]:
    """Cut the holes out of the pieces of one thread."""
    apart = joined([Piece(start, end, "") for start, end in sorted(holes)], 0)
    result: list[Piece] = []
    ends = [hole.end for hole in apart]
    for piece in pieces:
        at = piece.start
        for place in range(bisect_right(ends, piece.start), len(apart)):
            hole = apart[place]
            if hole.start >= piece.end:
                break
            if hole.start > at:
                result.append(piece._replace(start=at, end=hole.start))
            at = hole.end
        if at < piece.end:
            result.append(piece._replace(start=at))
    return result


def _outermost(pieces: Iterable[Piece]) -> list[Piece]:
    result: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.start, -p.end)):
        at = result[-1].end if result else piece.start
        if piece.end > at:
            result.append(piece._replace(start=max(piece.start, at)))
    return result


def _placed(pieces: list[Piece]) -> list[Piece]:
    """Give ops outside any range a lane, by what is around them in their step.

    Up to the last backward work it is forward (the loss, say), before DDP copies its buckets back it is still backward,
    and after that it is part of the update (clipping, say).
    """
    last = {piece.step: piece.start for piece in pieces if piece.kind == "backward"}
    result: list[Piece] = []
    following = Piece(0, 0, "")
    for piece in reversed(pieces):
        if piece.kind != "op":
            following = piece
            lane = "backward" if piece.kind == "finish" else piece.kind
        elif following.kind == "finish" and following.step == piece.step:
            lane = "backward"
        else:
            lane = "update" if piece.start > last.get(piece.step, piece.start) else "forward"
        result.append(piece._replace(kind=lane))
    return result[::-1]
