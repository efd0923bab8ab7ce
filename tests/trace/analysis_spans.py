"""Traces made by hand: steps of known pieces, in milliseconds."""

from syncline.trace import Span, Trace

MS = 1_000_000


def span(lane, start, end, *, rank=0, name="", unit="", step=0, size=0):
    return Span(rank, lane, name or lane, unit, step, round(start * MS), round(end * MS), size)


def steps(count, *ranks, length=None, jitter=lambda step: 0.0):
    """Each rank is a list of (lane, ms) or (lane, ms, unit, bytes), one after the other; exchanges end together.

    A rank that comes to an exchange later makes the others wait, as a collective does.
    """
    spans = []
    at = [0.0] * len(ranks)
    for step in range(count):
        begins = list(at)
        for pieces in zip(*ranks, strict=True):
            meet = max(at) if pieces[0][0] == "exchange" else 0.0
            for rank, (lane, ms, *more) in enumerate(pieces):
                unit, size = more if more else ("", 0)
                long = ms + (jitter(step) if lane == "forward" else 0.0)
                end = max(at[rank], meet) + long
                name = "all-reduce" if lane == "exchange" else lane
                if lane != "idle":
                    spans.append(span(lane, at[rank], end, rank=rank, name=name, unit=unit, step=step, size=size))
                at[rank] = end
        if length is not None:
            at = [begin + length for begin in begins]
        spans += [span("step", begins[rank], at[rank], rank=rank, step=step) for rank in range(len(ranks))]
    return Trace.of(spans).spans
