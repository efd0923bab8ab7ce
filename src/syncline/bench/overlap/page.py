"""The page of `bench overlap`: bars against the bound, the table, and two timelines on one axis. Self-contained."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from syncline.bench.overlap.table import cells, headings
from syncline.bench.overlap.timeline import STYLE as TIMELINE_STYLE
from syncline.bench.overlap.timeline import TRACKS, picture
from syncline.report.figures import bandwidth, one_line, printable, significant

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1c2430;"
    "background:#fff;overflow-wrap:anywhere}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}.soft{color:#5b6673;font-size:14px}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px}"
    "td,th{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #8883;vertical-align:bottom}"
    "table{overflow-wrap:normal}td,.lane{white-space:nowrap}th{max-width:5.5rem}"
    "td:first-child,th:first-child{text-align:left}.crashed{color:#b3261e}figure{margin:1rem 0}"
    "figcaption{margin-bottom:.2rem}svg{width:100%;height:auto;display:block}"
    "svg text{font:12px system-ui,sans-serif;fill:#5b6673}"
    ".compute{fill:#8b949e}.rival{fill:#d59a6a}.ours{fill:#1f6fc5}.bound{stroke:#1c2430;stroke-width:2}"
    ".range{stroke:#1c243088;stroke-width:1}.key{display:inline-block;width:11px;height:11px;border-radius:2px;"
    "margin:0 .3rem 0 .9rem}"
    "@media(prefers-color-scheme:dark){body{background:#14181d;color:#e3e8ee}.soft,svg text{fill:#a3adb8;"
    "color:#a3adb8}.bound{stroke:#e3e8ee}.range{stroke:#e3e8ee88}.crashed{color:#ff8a80}.ours{fill:#6db1ff}}"
)
_WIDTH, _LEFT, _RIGHT, _ROW = 1000, 270, 165, 26


def page(result: Mapping[str, Any]) -> str:
    """The whole page as text."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>bench overlap</title><style>{_STYLE}{TIMELINE_STYLE}{_keys()}</style>",
        f"<h1>{_text(result['title'])}</h1><p class=soft>{_text(_about(result))}</p>",
        *(f"<p><strong>Note:</strong> {_text(text)}</p>" for text in result["warnings"]),
        "<h2>Time of a step</h2>",
        _bars(result["rows"]),
        _timelines(result),
        "<h2>Figures</h2>",
        _table(result),
        _crashes(result["rows"]),
        "<p class=soft>Bound: the longer of compute alone (all ranks at once, nothing exchanged) and the bytes on a"
        " rank's link at the measured rate. A ratio is of turns in one round; the median of the rounds is shown. A star"
        " marks the best bucket size.</p>",
        f"<p class=soft>{_text(', '.join(f'{k} {v}' for k, v in result['environment'].items()))}</p></html>\n",
    ]
    return "".join(parts).encode("utf-8", "replace").decode("utf-8")


def _about(result: Mapping[str, Any]) -> str:
    setting, link = result["setting"], result["link"]
    where = f"{setting['ranks']} ranks on {setting['nodes']} nodes" if setting["nodes"] else f"{setting['ranks']} ranks"
    parts = [f"{setting['model']}, batch {setting['batch']} in all", where, setting["device"]]
    if link["measured_bits_per_s"]:
        shaped = f" of {setting['bandwidth']}" if setting["bandwidth"] else ""
        parts.append(f"links{shaped} that carry {bandwidth(link['measured_bits_per_s'])}")
    parts.append(f"{result['rounds_done']} of {setting['rounds']} rounds, contestants in turn")
    return "; ".join(parts)


def _bars(rows: Sequence[Mapping[str, Any]]) -> str:
    """A bar a contestant, with its range over the rounds and a mark at its bound."""
    timed = [row for row in rows if row["step_ms"] is not None]
    if not timed:
        return "<p>No step was timed.</p>"
    top = max(row["step_ms_high"] for row in timed)
    scale = (_WIDTH - _LEFT - _RIGHT) / top
    parts = []
    for number, row in enumerate(timed):
        y = number * _ROW + 4
        x = _LEFT + row["step_ms"] * scale
        low, high = (_LEFT + row[key] * scale for key in ("step_ms_low", "step_ms_high"))
        text = f"{significant(row['step_ms'], digits=4)} ms"
        if row["to_bound"] is not None:
            text += f", {row['to_bound']:.2f} of bound"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{_text(row["strategy"])}</text>')
        parts.append(f'<rect class="{row["kind"]}" x="{_LEFT}" y="{y}" width="{x - _LEFT:.1f}" height="18" rx="2"/>')
        ends = f"M{low:.1f} {y + 6}v6M{high:.1f} {y + 6}v6"
        parts.append(f'<path class="range" d="M{low:.1f} {y + 9}H{high:.1f}{ends}"/>')
        if row["bound_ms"] is not None and row["bound_ms"] <= top:
            at = _LEFT + row["bound_ms"] * scale
            parts.append(f'<path class="bound" d="M{at:.1f} {y - 2}v22"/>')
        parts.append(f'<text x="{max(x, high) + 6:.1f}" y="{y + 13}">{text}</text>')
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {len(timed) * _ROW + 6}" role="img" aria-label="time of a step">'
        f"{''.join(parts)}</svg><figcaption class=soft>Whiskers: the rounds' means. Upright line: the bound"
        " max(compute, wire) for the bytes that this contestant sends.</figcaption></figure>"
    )


def _timelines(result: Mapping[str, Any]) -> str:
    shown = [name for name in result["pictured"] if result["timelines"].get(name, {}).get("marks")]
    if not shown:
        return ""
    scale = max(result["timelines"][name]["marks"][-1] for name in shown)
    lanes = [lane for track in TRACKS.values() for lane in track]
    legend = "".join(f'<span class=lane><span class="key k-{lane}"></span>{lane}</span> ' for lane in lanes)
    figures = "".join(
        f"<figure><figcaption><strong>{_text(name)}</strong></figcaption>"
        f"{picture(result['timelines'][name], name=name, scale_ms=scale)}</figure>"
        for name in shown
    )
    return (
        "<h2>Two steps, on one axis</h2><p class=soft>Rank 0, the last two whole steps of the last round. In torch's"
        " DDP a bucket's exchange holds its compression, too.</p>"
        f"<p class=soft>{legend}</p>{figures}"
    )


def _keys() -> str:
    """The legend's colours, from those of the bars."""
    return TIMELINE_STYLE.partition(".mark")[0].replace(".t-", ".k-").replace("fill:", "background:")


def _table(result: Mapping[str, Any]) -> str:
    heads = headings(result)
    head = "".join(f"<th>{_text(text)}</th>" for text in heads)
    body = "".join(
        f"<tr{' class=crashed' if row['status'] == 'crashed' else ''}>"
        + "".join(f"<td>{_text(cell)}</td>" for cell in cells(row, result))
        + "</tr>"
        for row in result["rows"]
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _crashes(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(
        f"<p class=crashed>{_text(row['strategy'])} crashed on rank {row['error']['rank']}:"
        f" {_text(one_line(row['error']['summary']))}</p>"
        for row in rows
        if row["error"]
    )


def _text(value: object) -> str:
    return html.escape(printable(value))
