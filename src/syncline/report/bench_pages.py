"""Pages of the benchmarks (`bench codecs`, `quality`, `models`, `overlap` ...) and of `simulate --sweep`.

A page is charts, a table and, for overlap, two steps on one time scale. These functions turn a benchmark's result into
plain data; `assets/bench.html.j2` and `assets/js/plots.js` draw it with the frame, styles and charts of the report.
"""

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


def quality_page(result: Row, table: Table, *, note: str) -> str:
    """The page of `bench quality`: for each task the loss under every codec beside the dense loss, over all seeds."""
    rows: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in result["rows"]:
        rows.setdefault((row["task"], row["network"]), {}).setdefault(row["codec"], []).append(row)
    groups, names = [], ["dense"]
    for number, ((task, network), by_codec) in enumerate(rows.items()):
        plots: list[dict[str, Any]] = []
        for codec, ours in by_codec.items():
            if codec == "none" or "none" not in by_codec:
                continue
            for phase in ours[0]["loss"]:
                label = codec if len(ours[0]["loss"]) == 1 else f"{codec}, {phase}"
                names.append(f"{task}: {label}")
                key = f"loss-{number}-{len(plots) + 1}"
                plots.append(_loss_plot(key, label, len(names) - 1, ours, by_codec["none"], phase=phase))
        where = f" on links of {network}, over seconds" if network else ", over steps"
        colours = [("dense", "ideal"), ("the codec", "s0")]
        if plots:
            groups.append(Group(f"{task}: training loss of each seed{where}", plots, key=colours, small=True))
    return _render("Quality of training under every codec", groups, table, names, facts=_facts(result), notes=[note])


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


def models_page(result: Row, table: Table) -> str:
    """The page of `bench models`: the throughput of every strategy, a chart for each model and bandwidth."""
    timed = [row for row in result["rows"] if row["samples_per_s"]]
    names = list(dict.fromkeys(row["strategy"] for row in timed))
    colors = dict(zip(names, palette(names), strict=True))
    cells = dict.fromkeys((row["model"], row["bandwidth"]) for row in timed)
    plots = [
        {
            "id": f"models-{number}",
            "kind": "bars",
            "title": f"{model}, {network}",
            "rows": [
                {
                    "color": colors[row["strategy"]],
                    "label": row["strategy"],
                    "note": f"{significant(row['samples_per_s'])} samples/s",
                    "value": rounded(row["samples_per_s"]),
                }
                for row in timed
                if (row["model"], row["bandwidth"]) == (model, network)
            ],
        }
        for number, (model, network) in enumerate(cells)
    ]
    setting = result["setting"]
    facts = [f"models of size {setting['size']}", f"{setting['nodes']} nodes", f"{setting['rounds']} rounds in turn"]
    return _render(
        "Models, strategies and networks",
        [Group("Samples per second", plots, small=True)] if plots else [],
        table,
        facts=[*facts, *_facts(result)],
        cautions=result["warnings"],
        notes=[
            "vs ddp: DDP's step / this step in the same round, median and range over the rounds. Sent: bytes per step"
            " of the busiest rank. Memory: peak of the rank with the most. Loss: mean of five steps at the last step"
            " that all strategies of the contest have reached, beside DDP's; a few dozen steps say nothing about the"
            " end of a training."
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


def networks_page(result: Row, points: Mapping[str, Sequence[tuple[float, float]]], table: Table) -> str:
    """The page of `bench overhead --never-slower` on a GPU: the step over the bandwidth of the links, and all claims.

    `points`: by way of training, pairs of bits per second and milliseconds.
    """
    ends = sorted({bits for line in points.values() for bits, _ in line})
    plot = _lines(
        "networks",
        "Step time over the bandwidth of the links",
        [{"run": run, "points": sorted(_point(*point) for point in line)} for run, line in enumerate(points.values())],
        x={"name": "bandwidth", "log": True, "ticks": ends, "format": "bandwidth"},
        y={"log": True, "format": "duration"},
        legend=True,
    )
    groups = [Group("ResNet-50 on links of any speed", [plot])] if ends else []
    return _render("Never slower than torch", groups, table, list(points), facts=_facts(result))


def pipeline_page(result: Row, table: Table, more: Sequence[tuple[str, Table]], *, sentences: Sequence[str]) -> str:
    """The page of `bench pipeline`: accuracy, frozen blocks, stages and replicas of each way over time."""
    rows = result["rows"]
    names = [*(row["name"] for row in rows), *_SHAPE]
    scored = [(run, row) for run, row in enumerate(rows) if row["accuracy"] is not None]
    curves = _lines(
        "accuracy",
        "Test accuracy over seconds of training, evaluation not counted",
        [{"run": run, "points": _accuracies(row["epochs"])} for run, row in scored],
        x={"name": "seconds", "format": "number"},
        y={"format": "percent"},
        legend=True,
    )
    shapes = [
        _lines(
            f"shape-{run}",
            row["name"],
            [
                {"run": len(rows) + at, "cls": f"s{at}", "points": _steps_over_time(row["epochs"], key)}
                for at, key in enumerate(_SHAPE.values())
            ],
            x={"name": "seconds", "format": "number"},
            y={"zero": True, "format": "count"},
            height=200,
        )
        for run, row in enumerate(rows)
        if row["epochs"][-1]["frozen"]
    ]
    key = [(name, f"s{at}") for at, name in enumerate(_SHAPE)]
    note = "A step in the lines is a freeze or a reshape; its length is its cost. The table of changes has the figures."
    groups = [
        *([Group("Accuracy", [curves])] if scored else []),
        *([Group("Frozen blocks, stages and replicas", shapes, key=key, small=True, note=note)] if shapes else []),
    ]
    setting = result["setting"]
    facts = [f"{setting['model']}, batch {setting['batch']} in all", f"{setting['ranks']} ranks", *_facts(result)]
    return _render(
        "Freeze-and-shrink pipelines", groups, table, names, more=more, facts=facts, sentences=sentences,
        cautions=result["warnings"],
    )  # fmt: skip


_SHAPE = {"frozen blocks": "frozen", "stages": "stages", "replicas": "replicas"}
"""Lines of the chart of a run's shape: name, and key in its epochs."""


def _accuracies(epochs: Sequence[Row]) -> list[list[float | None]]:
    return [_point(row["seconds"] - row.get("change_s", 0.0), row["accuracy"]) for row in epochs]


def _steps_over_time(epochs: Sequence[Row], key: str) -> list[list[float | None]]:
    """A value of each epoch as a line: level during the epoch, and sloped while it changes."""
    points, start = [], 0.0
    for row in epochs:
        points += [_point(start, row[key]), _point(row["seconds"] - row.get("change_s", 0.0), row[key])]
        start = row["seconds"]
    return points


def _render(
    title: str,
    groups: Sequence[Group],
    table: Table,
    names: Sequence[str] = (),
    *,
    spans: Sequence[dict[str, Any]] = (),
    pair: Sequence[str] = (),
    more: Sequence[tuple[str, Table]] = (),
    **texts: Sequence[str],
) -> str:
    """The page as text. `names` are the lines of the charts; `texts` are facts, sentences, cautions and notes.

    `more` has further tables with their headings.
    """
    plots = [plot for group in groups for plot in group.plots]
    runs = [{"label": name, "color": color} for name, color in zip(names, palette(names), strict=True)]
    data = {"parts": parts(), "runs": runs, "plots": plots, "pair": list(pair)}
    page = {
        "groups": groups,
        "tables": [("Figures", table), *more],
        "facts": (),
        "sentences": (),
        "cautions": (),
        "notes": (),
        **texts,
    }
    return render("bench.html.j2", data, spans=spans, charts="plots", title=title, version=__version__, page=page)


def _facts(result: Row) -> list[str]:
    known = {key: value for key, value in result["environment"].items() if value is not None}
    return [f"{key.replace('_', ' ')} {value}" for key, value in known.items()]


def _lines(name: str, title: str, series: Sequence[Row], **options: Any) -> dict[str, Any]:
    return {"id": name, "kind": "lines", "title": title, "series": series, **options}


def _point(x: float, y: float) -> list[float | None]:
    return [x, rounded(finite(y))]


def _loss_plot(
    key: str, label: str, number: int, ours: Sequence[Row], dense: Sequence[Row], *, phase: str
) -> dict[str, Any]:
    """The loss curves of all seeds; over seconds where they were measured."""
    timed = bool(ours[0]["seconds"])
    series = [
        {"run": run, "cls": css, "points": _curve(row, phase)}
        for run, css, rows in ((0, "ideal", dense), (number, "s0", ours))
        for row in rows
    ]
    # A curve that diverges leaves the chart at the top, so that the others can be read.
    known = [y for row in dense for y in map(finite, row["loss"][phase]) if y is not None]
    x = {"name": "seconds" if timed else "step", "format": "number" if timed else "count"}
    cap = rounded(max(known or [1.0]) * 1.1)
    return _lines(key, label, series, x=x, y={"zero": True, "format": "number"}, cap=cap, height=200)


def _curve(row: Row, phase: str) -> list[list[float | None]]:
    window, losses = row["window"], row["loss"][phase]
    ends = row["seconds"] or [min((number + 1) * window, row["steps"]) for number in range(len(losses))]
    return [_point(end, loss) for end, loss in zip(ends, losses, strict=True)]


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
