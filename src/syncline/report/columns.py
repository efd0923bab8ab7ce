"""Spans as the page's timeline holds them: a row a track, columns of small integers, every string once.

Times are nanoseconds from the first span, each start as the distance to the one before it in its row. A column is a
run of variable-length integers (seven bits a byte, low ones first) in base64: about twelve characters a span.
"""

import base64
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from syncline.report.figures import one_line
from syncline.trace.span import LANES, STEP, Span

ORDER = (STEP, *LANES)
"""Lanes from top to bottom."""

DEEP = 10
"""Rows that a lane gets for spans that overlap; what does not fit is drawn over the last one."""

_NAME = 200  # characters of a name; a longer one cannot be read and would be in the page as a whole


def columns(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as plain data, strict JSON."""
    origin = min((span.start for span in spans), default=0)
    strings: dict[str, int] = {}
    names = _Names(strings)
    kinds: dict[tuple[int, int, int], int] = {}
    rows: list[list[int]] = []
    starts, lengths, which, steps = bytearray(), bytearray(), bytearray(), bytearray()
    for (rank, lane), members in _lanes(spans):
        for slot, row in enumerate(_rows(members)):
            at, step = origin, 0
            for span in row:
                kind = (names[span.name], names[span.unit], max(0, span.bytes))
                _append(starts, span.start - at)
                _append(lengths, max(0, span.end - span.start))
                _append(which, kinds.setdefault(kind, len(kinds)))
                _append(steps, _zigzag(span.step - step))
                at, step = span.start, span.step
            rows.append([rank, names[lane], slot, len(row)])
    return {
        "strings": list(strings),
        "kinds": [number for kind in kinds for number in kind],
        "rows": rows,
        "start": _packed(starts),
        "length": _packed(lengths),
        "kind": _packed(which),
        "step": _packed(steps),
    }


def _lanes(spans: Iterable[Span]) -> list[tuple[tuple[int, str], list[Span]]]:
    found: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        found[span.rank, span.lane].append(span)
    place = {lane: number for number, lane in enumerate(ORDER)}
    return sorted(found.items(), key=lambda item: (item[0][0], place.get(item[0][1], len(ORDER)), item[0][1]))


def _rows(spans: list[Span]) -> list[list[Span]]:
    """Each span on the first row that is free by then; on the last one where all are taken."""
    rows: list[list[Span]] = []
    ends: list[int] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        for slot, end in enumerate(ends):  # noqa: B007 - the last one is meant, too
            if end <= span.start:
                break
        else:
            if len(rows) < DEEP:
                rows.append([])
                ends.append(0)
            slot = len(rows) - 1
        rows[slot].append(span)
        ends[slot] = max(ends[slot], span.end)
    return rows


class _Names(dict[str, int]):
    """The place of each name in the table of strings, under which it is shown."""

    def __init__(self, strings: dict[str, int]) -> None:
        super().__init__()
        self._strings = strings

    def __missing__(self, name: str) -> int:
        shown = one_line(name, limit=_NAME)
        self[name] = self._strings.setdefault(shown, len(self._strings))
        return self[name]


def _zigzag(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


def _append(column: bytearray, number: int) -> None:
    while number > 127:
        column.append(number & 127 | 128)
        number >>= 7
    column.append(number)


def _packed(column: bytearray) -> str:
    return base64.b64encode(column).decode()
