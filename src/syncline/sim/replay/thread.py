"""What a rank's training thread did, as pieces that follow each other: compute, other time, and standing still."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syncline.sim.replay.work import Work
from syncline.trace.span import BLOCKED, STEP, Span

STALL, OTHER = "stall", "other"
_COMPUTE = frozenset({"data", "forward", "backward", "update"})


@dataclass(slots=True)
class Piece:
    """A stretch of the training thread; `blocker` is what ended a stall. Between two steps, `step` is -1."""

    start: int
    end: int
    lane: str
    step: int
    blocker: Work | None = None


class Thread:
    """The pieces of one rank, from the start of its first step to the end of its last, without a hole."""

    def __init__(self, spans: Sequence[Span], beside: Sequence[Work], *, blocked: bool) -> None:
        """`spans`: its steps, its thread's own spans and its waits; `beside`: the rest of its work.

        `blocked`: the recorder has said where the thread stood still. Else it did where it computed nothing until an
        exchange (or codec work) was over.
        """
        self._steps = sorted((s for s in spans if s.lane == STEP), key=lambda s: s.start)
        self._bounds = [step.start for step in self._steps]
        self._ended = sorted(beside, key=lambda w: (w.end, w.place))
        self._ends = [work.end for work in self._ended]
        self.pieces: list[Piece] = []
        self._lay(spans, blocked=blocked)
        self.starts = [piece.start for piece in self.pieces]
        self.of: dict[tuple[int, str], list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            self.of[piece.step, piece.lane].append(piece)

    def stall(self, time: int) -> Piece | None:
        """The stall that the thread is in at a moment."""
        at = bisect_right(self.starts, time) - 1
        piece = self.pieces[at] if at >= 0 else None
        return piece if piece is not None and piece.lane == STALL and time < piece.end else None

    def share(self, step: int, lane: str, time: int) -> float | None:
        """Which share of a step's forward (or another lane) was done by then."""
        stretch = self.of.get((step, lane), ())
        whole = sum(p.end - p.start for p in stretch)
        return sum(max(0, min(p.end, time) - p.start) for p in stretch) / whole if whole else None

    def time(self, step: int, lane: str, share: float) -> int | None:
        """When this share of it was done."""
        stretch = self.of.get((step, lane), ())
        left = share * sum(p.end - p.start for p in stretch)
        for piece in stretch:
            if left <= piece.end - piece.start:
                return piece.start + round(max(0.0, left))
            left -= piece.end - piece.start
        return stretch[-1].end if stretch else None

    def first(self, step: int, lane: str) -> int | None:
        """When a step's update (or another lane) began."""
        stretch = self.of.get((step, lane), ())
        return stretch[0].start if stretch else None

    def _lay(self, spans: Iterable[Span], *, blocked: bool) -> None:
        begin, end = self._steps[0].start, self._steps[-1].end
        own = [(s.start, s.end, s.lane) for s in spans if s.lane in _COMPUTE]
        if blocked:
            own += [(s.start, s.end, STALL) for s in spans if s.lane == "wait" and s.name == BLOCKED]
        at = begin
        for start, stop, lane in sorted(own):
            start, stop = max(start, at), min(stop, end)
            if stop > start:
                self._gap(at, start, blocked=blocked)
                blocker = self._over(start, stop) if lane == STALL else None
                # Where nobody knows for what it stood, it stands as long as it did.
                self._put(start, stop, OTHER if lane == STALL and blocker is None else lane, blocker)
                at = stop
        self._gap(at, end, blocked=blocked)

    def _gap(self, start: int, end: int, *, blocked: bool) -> None:
        """Time without a span of its own: it stands until what ends in there is over, and does something else after."""
        if not blocked:
            held: list[tuple[int, int, Work]] = []
            for work in self._ended[bisect_right(self._ends, start) : bisect_right(self._ends, end)]:
                begin = max(work.start, start)
                while held and begin <= held[-1][1]:
                    begin = min(begin, held.pop()[0])
                if work.end > begin:
                    held.append((begin, work.end, work))
            for begin, stop, work in held:
                self._put(start, begin, OTHER)
                self._put(begin, stop, STALL, work)
                start = stop
        self._put(start, end, OTHER)

    def _over(self, start: int, end: int) -> Work | None:
        """What was over last within (start, end]."""
        at = bisect_right(self._ends, end) - 1
        return self._ended[at] if at >= 0 and self._ends[at] > start else None

    def _put(self, start: int, end: int, lane: str, blocker: Work | None = None) -> None:
        """File a stretch, cut where a step begins or ends."""
        while end > start:
            at = bisect_right(self._bounds, start) - 1
            if at >= 0 and start < self._steps[at].end:
                until, step = min(end, self._steps[at].end), self._steps[at].step
            else:
                until, step = min([end, *self._bounds[at + 1 : at + 2]]), -1
            if until < end and lane == STALL:
                self.pieces.append(Piece(start, until, OTHER, step))
            else:
                self.pieces.append(Piece(start, until, lane, step, blocker))
            start = until
