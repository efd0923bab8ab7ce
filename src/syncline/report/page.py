"""Content of the report page as plain data: the template formats it, the scripts draw it. No markup here."""

from collections.abc import Mapping
from typing import Any

from syncline.report.compare import Row, parts_ms, rows, share, step_median
from syncline.report.figures import one_line, rounded
from syncline.report.palette import palette
from syncline.report.scaling import curves, start_ups
from syncline.report.verdict import cautions, headline, verdicts
from syncline.results.file import finite
from syncline.results.schema import Results, Run
from syncline.trace.span import PHASES

PARTS = {phase: phase.replace("_", " ") for phase in PHASES}
"""Names of the parts of a step on the page, in the order of a step."""


def page(results: Results, *, loss_every: int = 20, loss_rows: int = 25) -> dict[str, Any]:
    """Everything that the template needs; an entry is a run, its colour and the strips of its parts."""
    table = rows(results)
    starts = start_ups(results)
    last = max((len(row.run.get("loss", [])) for row in table), default=0)
    stride = loss_every * max(1, -(-last // (loss_every * loss_rows)))
    return {
        "headline": headline(results),
        "entries": [
            {
                "color": color,
                "row": row,
                "verdict": verdict,
                "strip": shares_strip(row.run.get("breakdown", {})),
                "box": _box(row.run, table),
                "rank_strips": [shares_strip(rank.get("breakdown", {})) for rank in row.run.get("ranks", [])],
            }
            for row, verdict, color in zip(table, verdicts(results), palette([row.label for row in table]), strict=True)
        ],
        "cautions": [*map(str, results.get("warnings", [])), *cautions(results)],
        "start_ups": starts,
        "start_up_parts": dict.fromkeys(name for start in starts for name, _ in start.parts if name != "first step"),
        "curves": curves(results),
        "loss_steps": [*range(stride, last + 1, stride)] or ([last] if last else []),
        "config": flatten(results.get("config", {})),
        "environment": flatten(results.get("environment", {})),
        "data": chart_data(results),
    }


def parts() -> list[dict[str, str]]:
    """The parts of a step for the scripts, in the order of a step."""
    return [{"key": key, "name": name} for key, name in PARTS.items()]


def chart_data(results: Results) -> dict[str, Any]:
    """Data of the charts, strict JSON."""
    table = rows(results)
    colors = palette([row.label for row in table])
    color_of = {id(row.run): color for row, color in zip(table, colors, strict=True)}
    return {
        "parts": parts(),
        "runs": [_chart_run(row, color) for row, color in zip(table, colors, strict=True)],
        "curves": [
            {
                "strategy": curve.strategy,
                "color": color_of[id(curve.points[-1].run)],
                "points": [
                    {"n": p.world_size, "rate": rounded(p.samples_per_s), "speedup": rounded(p.speedup)}
                    | {"efficiency": rounded(p.efficiency), "whole": rounded(p.whole_speedup)}
                    for p in curve.points
                ],
            }
            for curve in curves(results)
        ],
    }


def flatten(table: Any) -> list[tuple[str, str]]:
    """A nested table as dotted names and printed values, depth first."""
    found: list[tuple[str, str]] = []
    pending = [("", table)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict) and value:
            dot = f"{name}." if name else ""
            pending += [(f"{dot}{key}", inner) for key, inner in reversed(value.items())]
        elif not isinstance(value, dict):
            found.append((name, _printed(value)))
    return found


def _printed(value: Any) -> str:
    """A value of the recipe or the environment as people write it: no brackets, quotes or capital True."""
    if isinstance(value, list | tuple):
        return ", ".join(_printed(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_printed(item)}" for key, item in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def shares_strip(parts: Mapping[str, Any], *, whole: float | None = None) -> list[tuple[str, float, float]]:
    """The parts of a step side by side: (part, start, width), in percent of `whole` (by default of their sum)."""
    values = {part: max(finite(parts.get(part)) or 0.0, 0.0) for part in PHASES}
    whole = sum(values.values()) if whole is None else whole
    strip, start = [], 0.0
    for part, value in values.items():
        width = 100 * value / whole if whole > 0 else 0.0
        if width > 0:
            strip.append((part, round(start, 3), round(width, 3)))
        start += width
    return strip


def _box(run: Run, table: list[Row]) -> dict[str, float] | None:
    """Quartiles, median and 95th percentile on a scale all rows share, in percent."""
    tops = [finite(row.run.get("step_ms", {}).get("p95")) for row in table]
    top = max((value for value in tops if value), default=0.0)
    step = {key: finite(run.get("step_ms", {}).get(key)) for key in ("q1", "median", "q3", "p95")}
    if not top or any(value is None for value in step.values()):
        return None
    return {key: round(min(100 * (value or 0.0) / top, 100), 2) for key, value in step.items()}


def _chart_run(row: Row, color: int) -> dict[str, Any]:
    run = row.run
    wire = run.get("wire", {})
    return {
        "label": row.label,
        "color": color,
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
