"""The sweep of `syncline simulate`: nodes by bandwidths as rows, text and a self-contained SVG."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from syncline.cluster.quantities import format_bandwidth

SERIES = (("dense", "dense_ms", "#8a94a0"), ("bf16", "bf16_ms", "#1f6fc5"), ("best compressed", "ms", "#c2571a"))
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 300, 200, 52, 26, 12, 34
_COLUMNS, _HEAD = 3, 62


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each pair: dense, bf16, best compressed, and whether that pays."""
    lines = [("nodes", "bandwidth", "dense ms", "bf16 ms", "compressed ms", "codec", "")]
    for row in rows:
        times = (f"{row[key]:.1f}" for key in ("dense_ms", "bf16_ms", "ms"))
        pays = f"pays, {row['gain']:.2f}x" if row["pays"] else ""
        lines.append((str(row["nodes"]), format_bandwidth(row["bandwidth"]), *times, row["codec"], pays))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            c.rjust(w) if n < 5 else c.ljust(w) for n, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def verdict(pays: Sequence[Mapping[str, Any]], highest: float) -> str:
    """For each number of nodes, the bandwidth from which on compression does not pay."""
    lines = ["compression beyond bf16 pays"]
    for entry in pays:
        below = entry["below"]
        said = f"up to {format_bandwidth(highest)} and beyond" if below is None else f"below {format_bandwidth(below)}"
        lines.append(f"  on {entry['nodes']} nodes: {'never here' if below == 0 else said}")
    return "\n".join(lines)


def svg(rows: Sequence[Mapping[str, Any]], pays: Sequence[Mapping[str, Any]], *, title: str) -> str:
    """A panel for each number of nodes: step time over bandwidth, both logarithmic; dashed: where it ends to pay."""
    panels = len(pays)
    columns = min(_COLUMNS, panels)
    width, height = columns * _WIDTH, _HEAD + -(-panels // columns) * _HEIGHT
    times = [row[key] for row in rows for _, key, _ in SERIES]
    span = [math.log10(row["bandwidth"]) for row in rows]
    frame = (min(span), max(span), math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)) + 1e-9))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{html.escape(title)}"><style>text{{font:11px system-ui,sans-serif;fill:#1c2430}}</style>'
        f'<rect width="{width}" height="{height}" fill="#fff"/><text x="12" y="20">{html.escape(title)}</text>'
    ]
    for number, (name, _, colour) in enumerate(SERIES):
        x = 12 + 120 * number
        parts.append(
            f'<path d="M{x} 38h22" stroke="{colour}" stroke-width="2"/><text x="{x + 28}" y="42">{name}</text>'
        )
    for number, entry in enumerate(pays):
        mine = [row for row in rows if row["nodes"] == entry["nodes"]]
        place = f"translate({number % columns * _WIDTH} {_HEAD + number // columns * _HEIGHT})"
        parts.append(f'<g transform="{place}">{_panel(mine, entry, frame)}</g>')
    return "".join(parts) + "</svg>\n"


def _panel(rows: Sequence[Mapping[str, Any]], entry: Mapping[str, Any], frame: tuple[float, float, int, int]) -> str:
    low_x, high_x, low_y, high_y = frame
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def at(bandwidth: float, ms: float) -> tuple[float, float]:
        across = (math.log10(bandwidth) - low_x) / ((high_x - low_x) or 1)
        up = (math.log10(ms) - low_y) / ((high_y - low_y) or 1)
        return _LEFT + across * (right - _LEFT), bottom - up * (bottom - _TOP)

    parts = [f'<text x="{_LEFT}" y="16">{entry["nodes"]} nodes</text>']
    for decade in range(low_y, high_y + 1):
        _, y = at(10**low_x, 10.0**decade)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#8884" fill="none"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g} ms</text>')
    for bandwidth in (min(r["bandwidth"] for r in rows), max(r["bandwidth"] for r in rows)):
        x, _ = at(bandwidth, 10.0**low_y)
        anchor = "start" if x < _WIDTH / 2 else "end"
        label = format_bandwidth(bandwidth)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{label}</text>')
    for _, key, colour in SERIES:
        points = (at(row["bandwidth"], row[key]) for row in sorted(rows, key=lambda r: r["bandwidth"]))
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    if entry["below"]:
        x, _ = at(entry["below"], 10.0**low_y)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#c2571a" stroke-dasharray="4 3" fill="none"/>')
    return "".join(parts)
