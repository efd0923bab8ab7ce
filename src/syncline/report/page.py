"""Content of the report page as plain data: the template formats it, the scripts draw it. No markup here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncline.report.compare import Row, parts_ms, rows, share, step_median
from syncline.report.figures import one_line, rounded
from syncline.report.scaling import Curve, StartUp, curves, start_ups
from syncline.report.verdict import Verdict, cautions, headline, verdicts
from syncline.results.file import finite
from syncline.results.schema import Results, Run
from syncline.trace.span import PHASES

PARTS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "exposed_encode": "exposed encode",
    "exposed_exchange": "exposed exchange",
    "wait": "wait",
    "update": "update",
    "other": "other",
}
"""Names of the parts of a step on the page, in the order of a step."""

Strip = tuple[tuple[str, float, float], ...]
"""The parts of a step side by side: (part, start, width), both in percent."""


@dataclass(frozen=True)
class Entry:
    """One run on the page: its row and verdict, its place in the palette, and the strips of its parts."""

    index: int
    row: Row
    verdict: Verdict
    strip: Strip
    box: dict[str, float] | None
    rank_strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Page:
    """Everything the template needs."""

    results: Results
    headline: str
    entries: tuple[Entry, ...]
    cautions: tuple[str, ...]
    start_ups: tuple[StartUp, ...]
    start_up_parts: tuple[str, ...]
    curves: tuple[Curve, ...]
    loss_steps: tuple[int, ...]
    config: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    data: dict[str, Any]


def page(results: Results, *, loss_every: int = 20, loss_rows: int = 25) -> Page:
    """The page of `results`."""
    table = rows(results)
    starts = start_ups(results)
    last = max((len(row.run.get("loss", [])) for row in table), default=0)
    stride = loss_every * max(1, -(-last // (loss_every * loss_rows)))
    return Page(
        results=results,
        headline=headline(results),
        entries=tuple(_entry(i, r, v, table) for i, (r, v) in enumerate(zip(table, verdicts(results), strict=True))),
        cautions=(*map(str, results.get("warnings", [])), *cautions(results)),
        start_ups=tuple(starts),
        start_up_parts=tuple(
            dict.fromkeys(name for start in starts for name, _ in start.parts if name != "first step")
        ),
        curves=tuple(curves(results)),
        loss_steps=tuple([*range(stride, last + 1, stride)] or ([last] if last else [])),
        config=tuple(flatten(results.get("config", {}))),
        environment=tuple(flatten(results.get("environment", {}))),
        data=chart_data(results),
    )


def chart_data(results: Results) -> dict[str, Any]:
    """Data of the charts, strict JSON."""
    table = rows(results)
    index = {id(row.run): i for i, row in enumerate(table)}
    return {
        "parts": [{"key": key, "name": name} for key, name in PARTS.items()],
        "runs": [_chart_run(row) for row in table],
        "curves": [
            {
                "strategy": curve.strategy,
                "color": index[id(curve.points[-1].run)],
                "points": [
                    {
                        "n": point.world_size,
                        "rate": rounded(point.samples_per_s),
                        "speedup": rounded(point.speedup),
                        "efficiency": rounded(point.efficiency),
                        "whole": rounded(point.whole_speedup),
                    }
                    for point in curve.points
                ],
            }
            for curve in curves(results)
        ],
    }


def flatten(table: Any, *, prefix: str = "") -> list[tuple[str, str]]:
    """A nested table as dotted names and printed values, depth first."""
    found: list[tuple[str, str]] = []
    pending = [(prefix, table)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict) and value:
            dot = f"{name}." if name else ""
            pending += [(f"{dot}{key}", inner) for key, inner in reversed(value.items())]
        elif not isinstance(value, dict):
            found.append((name, "none" if value is None else str(value)))
    return found


def _entry(index: int, row: Row, verdict: Verdict, table: list[Row]) -> Entry:
    return Entry(
        index=index,
        row=row,
        verdict=verdict,
        strip=shares_strip(row.run.get("breakdown", {})),
        box=_box(row.run, table),
        rank_strips=tuple(shares_strip(rank.get("breakdown", {})) for rank in row.run.get("ranks", [])),
    )


def shares_strip(parts: Mapping[str, Any], *, whole: float | None = None) -> Strip:
    """The parts of a step side by side, in percent of `whole` (by default of their sum)."""
    values = {part: max(finite(parts.get(part)) or 0.0, 0.0) for part in PHASES}
    whole = sum(values.values()) if whole is None else whole
    strip, start = [], 0.0
    for part, value in values.items():
        width = 100 * value / whole if whole > 0 else 0.0
        if width > 0:
            strip.append((part, round(start, 3), round(width, 3)))
        start += width
    return tuple(strip)


def _box(run: Run, table: list[Row]) -> dict[str, float] | None:
    """Quartiles, median and 95th percentile on a scale all rows share, in percent."""
    tops = [finite(row.run.get("step_ms", {}).get("p95")) for row in table]
    top = max((value for value in tops if value), default=0.0)
    step = {key: finite(run.get("step_ms", {}).get(key)) for key in ("q1", "median", "q3", "p95")}
    if not top or any(value is None for value in step.values()):
        return None
    return {key: round(min(100 * (value or 0.0) / top, 100), 2) for key, value in step.items()}


def _chart_run(row: Row) -> dict[str, Any]:
    run = row.run
    wire = run.get("wire", {})
    return {
        "label": row.label,
        "ok": row.ok,
        "loss": [rounded(finite(v)) for v in run.get("loss", [])],
        "times": [rounded(finite(v)) for v in run.get("step_ms_series", [])],
        "median": rounded(step_median(run)),
        "shares": {part: rounded(share(run, part)) for part in PHASES} if run.get("breakdown") else None,
        "ms": {part: rounded(ms) for part, ms in parts_ms(run).items()} if run.get("breakdown") else None,
        "wire": {
            "bytes": rounded(finite(run.get("wire_bytes_per_step"))),
            "theory": rounded(finite(wire.get("theory_bytes"))),
            "formula": one_line(wire.get("formula", ""), limit=40),
            "measured": bool(wire.get("measured")),
        },
    }
