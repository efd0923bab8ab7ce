"""A rank's training thread as consecutive segments: compute, other time, and stalls in which it was blocked."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syncline.sim.replay.background import Work
from syncline.trace.span import BLOCKED, ISSUING, STEP, TRAINING_LANES, Span

STALL, OTHER = "stall", "other"


@dataclass(slots=True)
class Segment:
    """A segment of the training thread; `blocker` is the work whose end ended a stall. Between steps, `step` is -1.

    `needs` are the places of work that must have ended before the thread continues after the segment.
    """

    start: int
    end: int
    lane: str
    step: int
    blocker: Work | None = None
    needs: Sequence[int] = ()


class Thread:
    """The segments of one rank, without gaps, from the start of its first step to the end of its last."""

    def __init__(self, spans: Sequence[Span], background: Sequence[Work], *, blocked: bool) -> None:
        """`spans`: its steps, its thread's own spans and its waits; `background`: the rest of its work.

        `blocked`: the recorder marked when the thread was blocked. Otherwise the thread counts as blocked while it
        computed nothing and an exchange (or codec work) had not ended.
        """
        self._steps = sorted((s for s in spans if s.lane == STEP), key=lambda s: s.start)
        self.bounds = {step.step: (step.start, step.end) for step in self._steps}
        """By step: when it starts and ends."""
        self._ended = sorted(background, key=lambda w: (w.end, w.place))
        self._ends = [work.end for work in self._ended]
        self.segments: list[Segment] = []
        self._build(spans, blocked=blocked)
        self.starts = [segment.start for segment in self.segments]
        self.of: dict[tuple[int, str], list[Segment]] = defaultdict(list)
        for segment in self.segments:
            self.of[segment.step, segment.lane].append(segment)

    def stall(self, time: int) -> Segment | None:
        """The stall that the thread is in at this time."""
        at = bisect_right(self.starts, time) - 1
        segment = self.segments[at] if at >= 0 else None
        return segment if segment is not None and segment.lane == STALL and time < segment.end else None

    def share_done(self, step: int, lane: str, time: int) -> float | None:
        """The share of a step's forward (or another lane) that was done by this time."""
        segments = self.of.get((step, lane), ())
        whole = sum(s.end - s.start for s in segments)
        return sum(max(0, min(s.end, time) - s.start) for s in segments) / whole if whole else None

    def time_of_share(self, step: int, lane: str, share: float) -> int | None:
        """When this share of it was done."""
        segments = self.of.get((step, lane), ())
        left = share * sum(s.end - s.start for s in segments)
        for segment in segments:
            if left <= segment.end - segment.start:
                return segment.start + round(max(0.0, left))
            left -= segment.end - segment.start
        return segments[-1].end if segments else None

    def first(self, step: int, lane: str) -> int | None:
        """When a step's update (or another lane) started."""
        segments = self.of.get((step, lane), ())
        return segments[0].start if segments else None

    def _build(self, spans: Iterable[Span], *, blocked: bool) -> None:
        begin, end = self._steps[0].start, self._steps[-1].end
        own = [(s.start, s.end, s.lane) for s in spans if s.lane in TRAINING_LANES]
        own += [(s.start, s.end, OTHER) for s in spans if s.lane == "wait" and s.name == ISSUING]
        if blocked:
            own += [(s.start, s.end, STALL) for s in spans if s.lane == "wait" and s.name == BLOCKED]
        at = begin
        for start, stop, lane in sorted(own):
            start, stop = max(start, at), min(stop, end)
            if stop > start:
                self._gap(at, start, blocked=blocked)
                blocker = self._last_ended(start, stop) if lane == STALL else None
                # A stall with an unknown reason keeps its length.
                self._append(start, stop, OTHER if lane == STALL and blocker is None else lane, blocker)
                at = stop
        self._gap(at, end, blocked=blocked)

    def _gap(self, start: int, end: int, *, blocked: bool) -> None:
        """Time without a span: the thread is blocked until the work that ends in it has ended; the rest is other."""
        if not blocked:
            stalls: list[tuple[int, int, Work]] = []
            for work in self._ended[bisect_right(self._ends, start) : bisect_right(self._ends, end)]:
                begin = max(work.start, start)
                while stalls and begin <= stalls[-1][1]:
                    begin = min(begin, stalls.pop()[0])
                if work.end > begin:
                    stalls.append((begin, work.end, work))
            for begin, stop, work in stalls:
                self._append(start, begin, OTHER)
                self._append(begin, stop, STALL, work)
                start = stop
        self._append(start, end, OTHER)

    def _last_ended(self, start: int, end: int) -> Work | None:
        """The work that ended last within (start, end]."""
        at = bisect_right(self._ends, end) - 1
        return self._ended[at] if at >= 0 and self._ends[at] > start else None

    def _append(self, start: int, end: int, lane: str, blocker: Work | None = None) -> None:
        """Add a segment, split where a step starts or ends."""
        while end > start:
            at = bisect_right(self._steps, start, key=lambda s: s.start) - 1
            if at >= 0 and start < self._steps[at].end:
                until, step = min(end, self._steps[at].end), self._steps[at].step
            else:
                until, step = min(end, *(s.start for s in self._steps[at + 1 : at + 2])), -1
            stalled = lane == STALL and until < end
            self.segments.append(Segment(start, until, OTHER if stalled else lane, step, None if stalled else blocker))
            start = until
