"""A self-contained page of convergence: the table, and every codec's loss beside the dense one."""

import html
import math
from collections.abc import Sequence
from typing import Any

_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1c2430}"
    "table{border-collapse:collapse;margin-bottom:2rem}td,th{padding:.2rem .7rem;text-align:right;"
    "border-bottom:1px solid #dde2e8}td:first-child,th:first-child{text-align:left}.off{color:#b3261e}"
    ".grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:1rem}figure{margin:0}"
    "figcaption{font-size:13px}svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#5b6673}"
    ".axis{stroke:#8886;fill:none}.dense{stroke:#8a94a0;fill:none;stroke-width:1.5}"
    ".codec{stroke:#1f6fc5;fill:none;stroke-width:1.8}"
    "@media(prefers-color-scheme:dark){body{background:#14181d;color:#e3e8ee}.codec{stroke:#6db1ff}.off{color:#ff8a80}}"
)
HEADINGS = ("codec", "accuracy", "points below dense", "final loss", "wire ratio", "MB to dense accuracy")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 260, 150, 34, 8, 20


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, in the order of `HEADINGS`."""
    reached = row["bytes_to_dense_accuracy"]
    return [
        row["codec"],
        f"{row['accuracy']:.1%}",
        f"{row['points_below_dense']:+.1f}",
        f"{row['final_loss']:.4f}",
        f"{row['wire_ratio']:.1f}",
        "not reached" if reached is None else f"{reached / 1e6:.2f}",
    ]


def page(result: dict[str, Any]) -> str:
    """The whole page as text."""
    rows = result["rows"]
    dense = rows[0]
    about = ", ".join(f"{k} {v}" for k, v in {**result["setting"], **result["environment"]}.items())
    head = "".join(f"<th>{html.escape(h)}</th>" for h in HEADINGS)
    body = "".join(
        f"<tr{'' if row['within_a_point'] else ' class=off'}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row))
        + "</tr>"
        for row in rows
    )
    figures = "".join(_figure(row, dense) for row in rows[1:])
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>bench convergence</title><style>{_STYLE}</style><h1>Convergence under every codec</h1>"
        f"<p>{html.escape(about)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        "<p>Training loss (mean of 20 steps) over steps; grey is dense.</p>"
        f"<div class=grid>{figures}</div></html>\n"
    )


def _figure(row: dict[str, Any], dense: dict[str, Any]) -> str:
    ours, theirs = smooth(row["loss"]), smooth(dense["loss"])
    top = max([v for v in (*theirs, *ours[:1]) if math.isfinite(v)] or [1.0]) * 1.1
    steps = max(len(ours), len(theirs))

    def path(values: Sequence[float]) -> str:
        points = []
        for i, value in enumerate(values):
            x = _LEFT + i / max(1, steps - 1) * (_WIDTH - _LEFT - 4)
            share = min(value, top) / top if math.isfinite(value) else 1.0
            points.append(f"{x:.1f} {_TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM):.1f}")
        return "M" + "L".join(points)

    base = _HEIGHT - _BOTTOM
    return (
        f"<figure><figcaption>{html.escape(row['codec'])}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="loss of {html.escape(row["codec"])}">'
        f'<path class="axis" d="M{_LEFT} {_TOP}V{base}H{_WIDTH}"/>'
        f'<text x="{_LEFT - 4}" y="{_TOP + 8}" text-anchor="end">{top:.2g}</text>'
        f'<text x="{_LEFT - 4}" y="{base}" text-anchor="end">0</text>'
        f'<text x="{_WIDTH - 4}" y="{_HEIGHT - 6}" text-anchor="end">{steps} steps</text>'
        f'<path class="dense" d="{path(theirs)}"/><path class="codec" d="{path(ours)}"/></svg></figure>'
    )


def smooth(values: Sequence[float], window: int = 20) -> list[float]:
    """The mean of the last `window` values at each place."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out
