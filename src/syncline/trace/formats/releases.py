"""Who came last to an exchange, and whom that let go on."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from syncline.trace.span import BLOCKED, Span


def releases(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Places of two exchange spans each: of the rank that came last, and of one that had waited for it.

    `spans` are those that `split_waits` returns, in the order of their starts: a rank that waited has a wait up to the
    moment at which its transfer and that of the last rank begin. A collective has no one sender: its data move when the
    last rank is there, so that is where an arrow starts. They come in the order of their times.
    """
    waits = {(s.rank, s.step, s.name, s.unit, s.end) for s in spans if s.lane == "wait" and s.name != BLOCKED}
    if not waits:
        return
    together: dict[tuple[int, str, str, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for index, span in enumerate(spans):
        # An arrow is bound to a span that lasts; a transfer without any length is none.
        if span.lane == "exchange" and span.end > span.start:
            waited = (span.rank, span.step, span.name, span.unit, span.start) in waits
            together[span.step, span.name, span.unit, span.start][waited].append(index)
    for late, waiting in together.values():
        for index in waiting if late else ():
            yield late[0], index
