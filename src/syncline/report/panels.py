"""What the page shows of one traced run: the diagnosis as plain data for the template, the spans for the timeline."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.report.columns import columns
from syncline.report.excerpt import LIMIT, excerpt
from syncline.report.figures import duration, percent
from syncline.results.file import finite
from syncline.results.schema import SHARES
from syncline.trace.analysis.analysis import analyze
from syncline.trace.analysis.steps import prepare
from syncline.trace.formats.load import Source

UNITS = 200
"""Rows of the table of units at most: those that are exposed longest."""

Piece = tuple[str, float, float]


@dataclass(frozen=True)
class Bar:
    """One time in the comparison of a step: what it is, ms, width in %, and what is to be said of it."""

    name: str
    ms: float
    width: float
    note: str = ""


@dataclass(frozen=True)
class RankRow:
    """One rank: its step, its parts as a strip (part, start, width in %), ms by part."""

    rank: int
    step_ms: Mapping[str, Any]
    strip: tuple[Piece, ...]
    ms: Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """A traced run on the page; `index` is its place among the results, or -1, `data` is for the script."""

    label: str
    index: int
    analysis: Mapping[str, Any]
    notes: tuple[str, ...]
    command: str
    excerpt: str
    bars: tuple[Bar, ...]
    ranks: tuple[RankRow, ...]
    units: tuple[Mapping[str, Any], ...]
    more_units: int
    data: dict[str, Any]

    def placed(self, label: str, index: int) -> "Panel":
        """The same run under the name and the colour that the results give it."""
        return replace(self, label=label, index=index, data=self.data | {"label": label})


def panel(source: Source, *, label: str, limit: int = LIMIT, steps: tuple[int, int] | None = None) -> Panel:
    """The panel of a trace; `steps` keeps those in [first, last), and whatever else reaches into their time."""
    told = _told(source, steps)
    spans = (
        source.spans if steps is None else [s for of in prepare(source.spans, steps=steps).spans.values() for s in of]
    )
    chosen = excerpt(spans, limit=limit)
    units = sorted(told.get("units") or [], key=lambda unit: -(finite(unit.get("exposed_ms")) or 0.0))
    return Panel(
        label=label,
        index=-1,
        analysis=told,
        notes=tuple(str(note) for note in told.get("notes") or source.notes),
        command=f"syncline trace view {shlex.quote(str(source.path))} --steps {_others(chosen.gap)}",
        excerpt=chosen.sentence,
        bars=_bars(told, finite(source.metadata.get("prediction_ms"))),
        ranks=_ranks(told.get("ranks") or []),
        units=tuple(units[:UNITS]),
        more_units=max(0, len(units) - UNITS),
        data={
            "label": label,
            "spans": columns(chosen.spans),
            "gap": chosen.gap,
            "steady": _steady(told),
            "steps": [
                [row["rank"], row["step"], *(_short(row["breakdown_ms"].get(part)) for part in SHARES)]
                for row in told.get("per_step") or []
            ],
        },
    )


def folder_label(path: Path, metadata: Mapping[str, Any]) -> str:
    """What a trace is called where no results name it: its strategy, or where it lies."""
    strategy = metadata.get("strategy")
    if isinstance(strategy, str) and strategy:
        return strategy
    return path.parent.name if path.name.startswith("trace.json") and path.parent.name else path.name


def _others(gap: tuple[int, int] | None) -> str:
    """Steps in the middle of those that are left out, as an option takes them."""
    if gap is None:
        return "FIRST:LAST"
    middle = (gap[0] + gap[1]) // 2
    return f"{middle}:{min(middle + 20, gap[1] + 1)}"


def _told(source: Source, steps: tuple[int, int] | None) -> dict[str, Any]:
    """The analysis; a trace that does not allow one still has a timeline, and says why."""
    try:
        told = analyze(source.spans, metadata=source.metadata, notes=source.notes, steps=steps)
    except UsageError as error:
        return {"verdict": {"kind": "unclear", "sentence": str(error), "recoverable_ms": None}, "notes": source.notes}
    return told.as_json(str(source.path))


def _bars(told: Mapping[str, Any], predicted: float | None) -> tuple[Bar, ...]:
    """Measured, predicted and the bound, on one scale."""
    step = finite((told.get("step_ms") or {}).get("median"))
    bound = told.get("bound") or {}
    best, compute, wire = (finite(bound.get(key)) for key in ("bound_ms", "compute_ms", "wire_ms"))
    if not step:
        return ()
    found = [("measured", step, "median step")]
    if predicted:
        off = step / predicted - 1
        found.append(("predicted", predicted, f"{percent(abs(off))} {'more' if off > 0 else 'less'} was measured"))
    if best:
        parts = [f"{name} {duration(ms)}" for name, ms in (("compute", compute), ("wire", wire)) if ms is not None]
        found.append(("bound", best, f"the longer of {' and '.join(parts)}" if len(parts) > 1 else " ".join(parts)))
    top = max(ms for _, ms, _ in found)
    return tuple(Bar(name, ms, round(100 * ms / top, 2), note) for name, ms, note in found)


def _ranks(rows: Sequence[Mapping[str, Any]]) -> tuple[RankRow, ...]:
    """A strip a rank, as long as its mean step is to the longest of all ranks'."""
    top = max((sum(_parts(row.get("breakdown_ms") or {})) for row in rows), default=0.0)
    return tuple(_rank(row, top) for row in rows)


def _rank(row: Mapping[str, Any], top: float) -> RankRow:
    ms = row.get("breakdown_ms") or {}
    strip: list[Piece] = []
    at = 0.0
    for part, value in zip(SHARES, _parts(ms), strict=True):
        width = 100 * value / top if top else 0.0
        if width > 0:
            strip.append((part, round(at, 3), round(width, 3)))
        at += width
    return RankRow(int(row["rank"]), row.get("step_ms") or {}, tuple(strip), ms)


def _parts(ms: Mapping[str, Any]) -> Sequence[float]:
    return [max(finite(ms.get(part)) or 0.0, 0.0) for part in SHARES]


def _steady(told: Mapping[str, Any]) -> int:
    first = (told.get("steps") or {}).get("steady_first")
    return first if isinstance(first, int) else 0


def _short(value: Any) -> float:
    return round(finite(value) or 0.0, 4)
