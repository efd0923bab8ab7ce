"""Spans for the page's timeline: which spans of a trace are included, and their compact encoding.

Times are nanoseconds. A start is stored as its distance from the start before it in its row. A column is a sequence of
variable-length integers (seven bits per byte, low bits first) in base64: about twelve characters per span.
"""

import base64
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from syncline.report.figures import one_line, plural
from syncline.trace.span import LANES, STEP, Span, device_track, track_order

LIMIT = 100_000
"""Maximum number of spans of one run in a page."""

ORDER = (STEP, *LANES)
"""Lanes from top to bottom."""

MAX_ROWS = 10
"""Rows of a lane for spans that overlap. Spans that do not fit are drawn over the last row."""

_BEGINNING = 0.25  # share of the limit for the first steps; the steady steps get the larger part
_NAME = 200  # characters of a name in the page; nobody reads a longer one


@dataclass(frozen=True)
class Excerpt:
    """The spans that are shown, the range of steps that are left out, and a sentence about it."""

    spans: Sequence[Span]
    gap: tuple[int, int] | None = None
    sentence: str = ""


def excerpt(spans: Sequence[Span], *, limit: int = LIMIT) -> Excerpt:
    """The first and the last steps, as many as `limit` spans allow. Of a single huge step: its longest spans."""
    if len(spans) <= limit:
        return Excerpt(spans)
    counts = Counter(span.step for span in spans)
    steps = sorted(counts)
    kept = _first_and_last(steps, counts, limit)
    if not kept:
        last = steps[-1]
        longest = sorted((s for s in spans if s.step == last), key=lambda s: s.start - s.end)[:limit]
        text = f"Step {last} alone has {counts[last]:,} spans: its {len(longest):,} longest are shown."
        return Excerpt(longest, None, text)
    shown = [span for span in spans if span.step in kept]
    left_out = [step for step in steps if step not in kept]
    gap = (left_out[0], left_out[-1])
    text = (
        f"The trace has {len(spans):,} spans; here are the {len(shown):,} of {plural(len(kept), 'step')}."
        f" Steps {gap[0]} to {gap[1]} are left out."
    )
    return Excerpt(shown, gap, text)


def _first_and_last(steps: list[int], counts: Counter[int], limit: int) -> set[int]:
    """Steps from the front until a share of the limit is used, then steps from the back while they fit."""
    kept: set[int] = set()
    used = 0
    for order, most in ((steps, limit * _BEGINNING), (reversed(steps), limit)):
        for step in order:
            if used + counts[step] > most:
                break
            kept.add(step)
            used += counts[step]
    return kept


def columns(spans: Sequence[Span], *, on_gpu: bool = False) -> dict[str, Any]:
    """The spans as plain data, strict JSON. `on_gpu`: as in `partition`."""
    origin = min((span.start for span in spans), default=0)
    strings: dict[str, int] = {}

    @cache
    def name(text: str) -> int:
        """Index of a name in the table of strings, where it is shortened to one line."""
        return strings.setdefault(one_line(text, limit=_NAME), len(strings))

    kinds: dict[tuple[int, int, int], int] = {}
    rows: list[list[int]] = []
    starts, lengths, which, steps = (bytearray() for _ in range(4))
    for (rank, lane, track), members in _tracks(spans):
        for slot, row in enumerate(_rows(members)):
            at, step = origin, 0
            for span in row:
                kind = (name(span.name), name(span.unit), max(0, span.bytes))
                _append(starts, span.start - at)
                _append(lengths, max(0, span.end - span.start))
                _append(which, kinds.setdefault(kind, len(kinds)))
                _append(steps, _zigzag(span.step - step))
                at, step = span.start, span.step
            rows.append([rank, name(lane), slot, len(row), *([name(track)] if track else [])])
    return {
        "strings": list(strings),
        "kinds": [number for kind in kinds for number in kind],
        "rows": rows,
        "start": _packed(starts),
        "length": _packed(lengths),
        "kind": _packed(which),
        "step": _packed(steps),
        "gpu": on_gpu,
    }


def _tracks(spans: Iterable[Span]) -> list[tuple[tuple[int, str, str], list[Span]]]:
    """The spans by rank, lane, and process group and stream."""
    found: dict[tuple[int, str, str], list[Span]] = defaultdict(list)
    for span in spans:
        found[span.rank, span.lane, device_track(span)].append(span)
    place = {lane: number for number, lane in enumerate(ORDER)}
    return sorted(
        found.items(),
        key=lambda item: (item[0][0], place.get(item[0][1], len(ORDER)), item[0][1], track_order(item[0][2])),
    )


def _rows(spans: list[Span]) -> list[list[Span]]:
    """Each span on the first row that is free when it starts, or on the last row if none is."""
    rows: list[list[Span]] = []
    ends: list[int] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        for slot, end in enumerate(ends):  # noqa: B007 - `slot` is used after the loop, too
            if end <= span.start:
                break
        else:
            if len(rows) < MAX_ROWS:
                rows.append([])
                ends.append(0)
            slot = len(rows) - 1
        rows[slot].append(span)
        ends[slot] = max(ends[slot], span.end)
    return rows


def _zigzag(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


def _append(column: bytearray, number: int) -> None:
    while number > 127:
        column.append(number & 127 | 128)
        number >>= 7
    column.append(number)


def _packed(column: bytearray) -> str:
    return base64.b64encode(column).decode()
