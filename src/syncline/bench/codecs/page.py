"""A self-contained page: encode and decode speed of every codec over the tensor's size, and the table."""

import html
import math
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 820, 420, 62, 44, 28, 210
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#1c2430}"
    "table{border-collapse:collapse}td,th{padding:.2rem .7rem;text-align:right;white-space:nowrap}"
    "td,th{border-bottom:1px solid #dde2e8}"
    "td:first-child,th:first-child{text-align:left}svg text{font:12px system-ui,sans-serif;fill:#1c2430}"
    "@media(prefers-color-scheme:dark){body{background:#14181d;color:#e3e8ee}svg text{fill:#e3e8ee}}"
)


def page(result: dict[str, Any]) -> str:
    """The whole page as text."""
    from syncline.bench.codecs.run import HEADINGS, cells

    where = ", ".join(f"{k} {v}" for k, v in result["environment"].items())
    head = "".join(f"<th>{html.escape(h)}</th>" for h in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(r)) + "</tr>" for r in result["rows"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>bench codecs</title><style>{_STYLE}</style>"
        f"<h1>Codecs, as fractions of a copy of the same tensor</h1><p>{html.escape(where)}</p>"
        f"{chart(result['rows'], 'encode_of_copy', 'encode')}{chart(result['rows'], 'decode_of_copy', 'decode')}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></html>\n"
    )


def chart(rows: Sequence[dict[str, Any]], key: str, title: str) -> str:
    """Lines over size, both axes logarithmic, as SVG; names at the right ends, kept apart."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["wire_ratio"] == 1:
            continue  # it does nothing, and would only stretch the axis
        lines.setdefault(row["codec"], []).append((math.log10(row["bytes"]), math.log10(max(1e-9, row[key]))))
    points = [p for line in lines.values() for p in line]
    if not points:
        return ""
    low_x, high_x = min(p[0] for p in points), max(p[0] for p in points)
    low_y, high_y = math.floor(min(p[1] for p in points)), math.ceil(max(p[1] for p in points) + 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / ((high_x - low_x) or 1)
        up = (y - low_y) / ((high_y - low_y) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title} speed over size">']
    parts.append(f'<text x="{LEFT}" y="16">{title}: fraction of a copy, over bytes of the tensor</text>')
    for decade in range(low_y, high_y + 1):
        _, y = at(low_x, decade)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#8885" fill="none"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_share(10.0**decade)}</text>')
    for x in sorted({p[0] for p in points}):
        place, _ = at(x, low_y)
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{size(10**x)}</text>')
    ordered = sorted(lines.items(), key=lambda item: -max(item[1])[1])
    heights = _apart([at(*max(line))[1] for _, line in ordered])
    for i, ((name, line), height) in enumerate(zip(ordered, heights, strict=True)):
        colour = f"hsl({i * 360 // len(lines)} 60% 45%)"
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in sorted(line)))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x = at(*max(line))[0] + 8
        parts.append(f'<text x="{x:.1f}" y="{height + 4:.1f}" style="fill:{colour}">{html.escape(name)}</text>')
    return "".join(parts) + "</svg>"


def _apart(heights: Sequence[float], gap: float = 13) -> list[float]:
    """Rising heights moved as little as it takes to stand a line apart and above the bottom."""
    out: list[float] = []
    for height in heights:
        out.append(max(height, out[-1] + gap) if out else height)
    floor = HEIGHT - 6.0
    for i in range(len(out) - 1, -1, -1):
        out[i] = min(out[i], floor)
        floor = out[i] - gap
    return out


def size(count: float) -> str:
    """Bytes for people."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 else f"{value * 100:.3g}%"
