"""Two steady steps of a rank as a picture: what computes, what encodes and decodes, what is on the wire."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

TRACKS = {
    "compute": ("data", "forward", "backward", "update", "wait"),
    "codec": ("encode", "decode"),
    "exchange": ("exchange",),
}
"""The rows of a picture, and the lanes on each. What a rank waits for, it does not compute."""

STYLE = (
    ".t-data{fill:#8fc7c0}.t-forward{fill:#9cc9ea}.t-backward{fill:#2f7fbf}.t-update{fill:#4f9d69}.t-wait{fill:#c9a3c1}"
    ".t-encode{fill:#f2c14e}.t-decode{fill:#c98f1b}.t-exchange{fill:#d9541e}"
    ".mark{stroke:#8b949e;stroke-dasharray:3 3}.base{stroke:#8b949e55}.cut{stroke:#fff6;stroke-width:.6}"
)
_WIDTH, _LEFT, _RIGHT = 1000, 78, 12
_BAR, _THIN, _GAP, _HEAD = 22, 9, 10, 20
_IDLE = {"data", "wait"}
_DEEP = 4
"""Exchanges in flight at once that get a line of their own."""
_SLIVER = 0.15
"""Pixels under which a span cannot be seen."""


def window(steps: Sequence[Sequence[int]], spans: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The last two whole steps of a turn, from start to start, in milliseconds from the first one's start."""
    starts = [start for start, _ in steps][-3:]
    if len(starts) < 3:
        return {"marks": [], "spans": []}
    zero, last = starts[0], starts[-1]
    seen = [
        [lane, name, unit, round((max(start, zero) - zero) / 1e6, 4), round((min(end, last) - zero) / 1e6, 4)]
        for lane, name, unit, _, start, end in spans
        if end > zero and start < last and lane != "step"
    ]
    return {"marks": [(start - zero) / 1e6 for start in starts], "spans": sorted(seen, key=lambda s: s[3])}


def stacked(spans: Sequence[Sequence[Any]], *, deep: int = _DEEP) -> list[tuple[int, Sequence[Any]]]:
    """Spans with the line each is drawn on: the first that is free, the last one where all are taken.

    >>> [line for line, _ in stacked([["e", "", "", 0, 4], ["e", "", "", 1, 2], ["e", "", "", 3, 5]])]
    [0, 1, 1]
    """
    ends: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda s: (s[3], s[4])):
        line = next((i for i, end in enumerate(ends) if end <= span[3]), len(ends))
        line = min(line, deep - 1)
        if line == len(ends):
            ends.append(span[4])
        else:
            ends[line] = max(ends[line], span[4])
        placed.append((line, span))
    return placed


def picture(timeline: Mapping[str, Any], *, name: str, scale_ms: float) -> str:
    """A timeline as SVG; two with the same `scale_ms` can be read against each other."""
    marks = timeline["marks"]
    per_ms = (_WIDTH - _LEFT - _RIGHT) / scale_ms
    parts: list[str] = []
    y = float(_HEAD)
    for track, lanes in TRACKS.items():
        placed = stacked([span for span in timeline["spans"] if span[0] in lanes])
        lines = max((line for line, _ in placed), default=0) + 1
        height = _BAR if track == "compute" or lines == 1 else _THIN
        if track == "compute":
            # What computes is drawn last, and so on top.
            placed, lines = [(0, span) for _, span in sorted(placed, key=lambda p: p[1][0] not in _IDLE)], 1
        parts.append(f'<text x="{_LEFT - 8}" y="{y + lines * height / 2 + 4:.1f}" text-anchor="end">{track}</text>')
        parts.append(f'<path class="base" d="M{_LEFT} {y + lines * height:.1f}H{_WIDTH - _RIGHT}"/>')
        seen = [(line, span) for line, span in placed if (span[4] - span[3]) * per_ms > _SLIVER]
        parts += [_bar(span, line, y, height, per_ms) for line, span in seen]
        y += lines * height + _GAP
    for number, at in enumerate(marks):
        x = _LEFT + at * per_ms
        parts.append(f'<path class="mark" d="M{x:.1f} {_HEAD - 6}V{y:.1f}"/>')
        if number:
            took = at - marks[number - 1]
            parts.append(f'<text x="{x - 4:.1f}" y="{_HEAD - 8}" text-anchor="end">{took:.1f} ms</text>')
    parts += _axis(scale_ms, per_ms, y)
    label = html.escape(f"timeline of {name}", quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {y + 18:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _bar(span: Sequence[Any], line: int, y: float, height: float, per_ms: float) -> str:
    lane, name, unit, start, end = span
    what = html.escape(" ".join(dict.fromkeys(word for word in (lane, name, unit) if word)), quote=True)
    x, width = _LEFT + start * per_ms, max(_SLIVER, (end - start) * per_ms)
    edge = " cut" if width > 4 else ""
    return (
        f'<rect class="t-{lane}{edge}" x="{x:.2f}" y="{y + line * height:.1f}" width="{width:.2f}"'
        f' height="{height - 1:.1f}"><title>{what}: {end - start:.2f} ms, from {start:.2f}</title></rect>'
    )


def _axis(scale_ms: float, per_ms: float, y: float) -> list[str]:
    rough = scale_ms / 8
    unit = 10.0 ** math.floor(math.log10(rough))
    tick = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [
        f'<text x="{_LEFT + i * tick * per_ms:.1f}" y="{y + 10:.0f}" text-anchor="middle">{i * tick:g}'
        f"{' ms' if i == 0 else ''}</text>"
        for i in range(int(scale_ms / tick) + 1)
    ]
