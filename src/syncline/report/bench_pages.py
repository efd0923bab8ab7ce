"""Pages of the benchmarks (`bench codecs`, `convergence`, `overlap`) and of `simulate --sweep`.

A page is charts, a table and, for overlap, two steps on one time scale. These functions turn a benchmark's result into
plain data; `assets/bench.html.j2` and `assets/js/plots.js` draw it with the frame, styles and charts of the report.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline import __version__
from syncline.report.figures import bandwidth, one_line, rounded, significant
from syncline.report.html import render
from syncline.report.page import parts
from syncline.report.palette import palette
from syncline.report.spans import columns
from syncline.results.file import finite
from syncline.trace.span import STEP, Span

Row = Mapping[str, Any]

_MAX_POINTS = 200
"""Points of a loss curve in a page."""
_SMOOTH = 20
"""Steps over which a loss curve is averaged."""
_SERIES = (("dense", "dense_ms", 9), ("bf16", "bf16_ms", 0), ("best compressed", "ms", 1))
"""Lines of a sweep: name, key in its rows, colour."""


@dataclass(frozen=True)
class Table:
    """The table of a page; `bad` holds the numbers of rows to mark as bad."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    bad: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Group:
    """Charts under one heading. `key` explains colours as (name, CSS class); `small` puts several charts in a row."""

    title: str
    plots: Sequence[dict[str, Any]]
    key: Sequence[tuple[str, str]] = ()
    small: bool = False
    note: str = ""


def codecs_page(result: Row, table: Table) -> str:
    """The page of `bench codecs`: speed of encoding and decoding over the tensor's size."""
    # A codec that does nothing would only stretch the axis.
    rows = [row for row in result["rows"] if row["wire_ratio"] != 1]
    names = list(dict.fromkeys(row["codec"] for row in rows))
    sizes = sorted({row["bytes"] for row in rows})
    plots = [
        _lines(
            part,
            f"{part.capitalize()} speed, relative to a copy of the same tensor",
            [
                {"run": run, "points": [_point(r["bytes"], r[f"{part}_of_copy"]) for r in rows if r["codec"] == name]}
                for run, name in enumerate(names)
            ],
            x={"name": "tensor size", "log": True, "ticks": sizes, "format": "size"},
            y={"log": True, "format": "percent"},
            legend=True,
        )
        for part in ("encode", "decode")
        if rows
    ]
    note = "100% is as fast as copying the tensor; a codec that writes fewer bytes than the copy can be faster."
    groups = [Group("Speed", plots, note=note)] if plots else []
    return _render("Speed of codecs", groups, table, names, facts=_facts(result))


def convergence_page(result: Row, table: Table) -> str:
    """The page of `bench convergence`: the training loss under every codec beside the dense loss."""
    dense, *others = result["rows"]
    plots = [_loss_plot(number, row, dense) for number, row in enumerate(others, 1)]
    group = Group(
        f"Training loss over steps, mean of {_SMOOTH} steps",
        plots,
        key=[("dense", "ideal"), ("the codec", "s0")],
        small=True,
    )
    facts = [*(f"{key} {value}" for key, value in result["setting"].items()), *_facts(result)]
    names = [row["codec"] for row in result["rows"]]
    return _render("Convergence under every codec", [group] if plots else [], table, names, facts=facts)


def overlap_page(result: Row, table: Table, *, sentences: Sequence[str]) -> str:
    """The page of `bench overlap`: step times beside their bounds, and one step of ours and of the best rival."""
    timed = [row for row in result["rows"] if row["step_ms"] is not None]
    colors = palette([row["strategy"] for row in timed])
    bars = {
        "id": "steps",
        "kind": "bars",
        "title": "Median step; whiskers: the means of the rounds; upright line: the bound",
        "rows": [_step_bar(row, color) for row, color in zip(timed, colors, strict=True)],
    }
    crashes = [
        f"{row['strategy']} crashed on rank {row['error']['rank']}: {one_line(row['error']['summary'])}"
        for row in result["rows"]
        if row["error"]
    ]
    shown = [name for name in result["pictured"] if result["timelines"].get(name, {}).get("marks")]
    medians = {row["strategy"]: row["step_ms"] for row in timed}
    return _render(
        result["title"],
        [Group("Time of a step", [bars])] if timed else [],
        table,
        spans=[_two_steps(name, result["timelines"][name], medians[name]) for name in shown],
        pair=shown,
        facts=[*_overlap_facts(result), *_facts(result)],
        sentences=sentences,
        cautions=[*result["warnings"], *crashes],
        notes=[
            "Bound: the longer of compute alone (all ranks at once, nothing exchanged) and the bytes on a rank's link"
            " at the measured rate. A ratio compares turns of the same round; the table has the median of the rounds."
            " A star marks the best bucket size."
        ],
    )


def sweep_page(rows: Sequence[Row], pays: Sequence[Row], table: Table, *, title: str) -> str:
    """The page of `simulate --sweep`: step time over bandwidth, one chart for each number of nodes."""
    bandwidths = [row["bandwidth"] for row in rows]
    ends = sorted({min(bandwidths), max(bandwidths)})
    times = [row[key] for row in rows for _, key, _ in _SERIES]
    plots = [
        _lines(
            f"nodes-{entry['nodes']}",
            f"{entry['nodes']} nodes",
            [
                {
                    "run": run,
                    "cls": f"s{colour}",
                    "points": sorted(
                        _point(row["bandwidth"], row[key]) for row in rows if row["nodes"] == entry["nodes"]
                    ),
                }
                for run, (_, key, colour) in enumerate(_SERIES)
            ],
            x={"name": "bandwidth", "log": True, "ticks": ends, "format": "bandwidth"},
            y={"log": True, "range": [min(times) / 1.2, max(times) * 1.2], "format": "duration"},
            height=240,
            mark=entry["below"] or None,
        )
        for entry in pays
    ]
    group = Group(
        "By number of nodes",
        plots,
        key=[(name, f"s{colour}") for name, _, colour in _SERIES],
        small=True,
        note="Dashed upright line: compression beyond bf16 pays only at lower bandwidths.",
    )
    return _render(title, [group], table, [name for name, _, _ in _SERIES])


def smooth(values: Sequence[float], window: int = _SMOOTH) -> list[float]:
    """The mean of the last `window` values at each place.

    >>> smooth([1.0, 2.0, 3.0], window=2)
    [1.0, 1.5, 2.5]
    """
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out


def _render(
    title: str,
    groups: Sequence[Group],
    table: Table,
    names: Sequence[str] = (),
    *,
    spans: Sequence[dict[str, Any]] = (),
    pair: Sequence[str] = (),
    **texts: Sequence[str],
) -> str:
    """The page as text. `names` are the lines of the charts; `texts` are facts, sentences, cautions and notes."""
    plots = [plot for group in groups for plot in group.plots]
    runs = [{"label": name, "color": color} for name, color in zip(names, palette(names), strict=True)]
    data = {"parts": parts(), "runs": runs, "plots": plots, "pair": list(pair)}
    page = {"groups": groups, "table": table, "facts": (), "sentences": (), "cautions": (), "notes": (), **texts}
    return render("bench.html.j2", data, spans=spans, charts="plots", title=title, version=__version__, page=page)


def _facts(result: Row) -> list[str]:
    known = {key: value for key, value in result["environment"].items() if value is not None}
    return [f"{key.replace('_', ' ')} {value}" for key, value in known.items()]


def _lines(name: str, title: str, series: Sequence[Row], **options: Any) -> dict[str, Any]:
    return {"id": name, "kind": "lines", "title": title, "series": series, **options}


def _point(x: float, y: float) -> list[float | None]:
    return [x, rounded(finite(y))]


def _loss_plot(number: int, row: Row, dense: Row) -> dict[str, Any]:
    ours, theirs = smooth(row["loss"]), smooth(dense["loss"])
    # A curve that diverges leaves the chart at the top, so that the others can be read.
    top = max([v for v in (*theirs, *ours[:1]) if math.isfinite(v)] or [1.0]) * 1.1
    stride = max(1, math.ceil(max(len(ours), len(theirs)) / _MAX_POINTS))
    series = [
        {"run": run, "cls": css, "points": [_point(i + 1, v) for i, v in enumerate(losses)][::stride]}
        for run, css, losses in ((0, "ideal", theirs), (number, "s0", ours))
    ]
    x, y = {"name": "step", "format": "count"}, {"zero": True, "format": "number"}
    return _lines(f"loss-{number}", row["codec"], series, x=x, y=y, cap=rounded(top), height=200)


def _step_bar(row: Row, color: int) -> dict[str, Any]:
    note = f"{significant(row['step_ms'], digits=4)} ms"
    if row["to_bound"] is not None:
        note += f", {row['to_bound']:.2f} of bound"
    return {
        "color": color,
        "label": row["strategy"],
        "note": note,
        "value": rounded(row["step_ms"]),
        "range": [rounded(row["step_ms_low"]), rounded(row["step_ms_high"])],
        "tick": rounded(row["bound_ms"]),
    }


def _overlap_facts(result: Row) -> list[str]:
    setting, link = result["setting"], result["link"]
    ranks = f"{setting['ranks']} ranks"
    facts = [
        f"{setting['model']}, batch {setting['batch']} in all",
        f"{ranks} on {setting['nodes']} nodes" if setting["nodes"] else ranks,
        setting["device"],
    ]
    if link["measured_bits_per_s"]:
        shaped = f" of {setting['bandwidth']}" if setting["bandwidth"] else ""
        facts.append(f"links{shaped} that carry {bandwidth(link['measured_bits_per_s'])}")
    return [*facts, f"{result['rounds_done']} of {setting['rounds']} rounds, contestants in turn"]


def _two_steps(label: str, timeline: Row, median_ms: float) -> dict[str, Any]:
    """The last two steps of a contestant, as the script of the timelines reads a trace.

    The one whose length is nearer to the median is shown first.
    """
    marks = timeline["marks"]
    shown = min(range(len(marks) - 1), key=lambda number: abs(marks[number + 1] - marks[number] - median_ms))
    ends = [round(ms * 1e6) for ms in marks]
    spans = [Span(0, STEP, "step", "", number, ends[number], ends[number + 1]) for number in range(len(marks) - 1)]
    for lane, name, unit, start, end in timeline["spans"]:
        step = max(number for number, mark in enumerate(marks[:-1]) if mark <= start)
        spans.append(Span(0, lane, name, unit, step, round(start * 1e6), round(end * 1e6)))
    return {"label": label, "spans": columns(spans), "gap": None, "steady": 0, "shown": shown, "steps": []}
