"""Traced runs on the page: find the traces beside results, and prepare diagnosis and spans of each for the template."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.report.changes import Change, changes, shape_over_time
from syncline.report.compare import labels, ranking, rows, that_train_well, with_several_ranks
from syncline.report.figures import duration, one_line, percent, size
from syncline.report.page import shares_strip
from syncline.report.palette import palette
from syncline.report.spans import LIMIT, columns, excerpt
from syncline.results.file import finite
from syncline.results.schema import Results
from syncline.trace.analysis.analyze import analyze
from syncline.trace.analysis.steps import prepare
from syncline.trace.formats.load import TRACE, load
from syncline.trace.merge.merge_ranks import Trace
from syncline.trace.span import PHASES

MAX_UNITS = 200
"""Maximum number of rows in the table of units: those with the most exposed time."""

MAX_SPANS = 400_000
"""Maximum number of spans in a page, all runs together."""

MAX_FILE_BYTES = 48 << 20
"""A compressed trace larger than this is not read for a report: it would take minutes."""


@dataclass(frozen=True)
class Panel:
    """A traced run on the page. `index` is its place among the results or -1; `data` is for the script."""

    label: str
    index: int
    analysis: Mapping[str, Any]
    notes: tuple[str, ...]
    command: str
    excerpt: str
    bars: Sequence[Mapping[str, Any]]
    """Times in the comparison of a step: name, milliseconds, width in percent, and a note."""
    ranks: Sequence[Mapping[str, Any]]
    """Each rank: its step time, its parts as a strip, and milliseconds for each part."""
    units: tuple[Mapping[str, Any], ...]
    more_units: int
    data: dict[str, Any]
    changes: tuple[Change, ...] = ()
    """Its freezes and reshapes."""
    shape: Sequence[Mapping[str, Any]] = ()
    """Lines of frozen blocks, stages and replicas over time."""
    color: int | None = None
    """Its colour in the palette, if the results give it one."""

    def placed(self, label: str, index: int, color: int) -> "Panel":
        """The same run under the name and the colour that the results give it."""
        return replace(self, label=label, index=index, color=color, data=self.data | {"label": label})


@dataclass(frozen=True)
class Traces:
    """Panels of the runs that have a trace, in the order of the results, and notes about traces that are not shown.

    The page opens with the panel of number `opened`.
    """

    panels: tuple[Panel, ...] = ()
    notes: tuple[str, ...] = ()
    opened: int = 0


def traces(results: Results, folder: Path, *, new_trace: Trace | None = None) -> Traces:
    """The traces in `folder`, the run folder of `results`. Panels are cached until their files change.

    So a comparison, which writes its page after each run, reads no file again, and that of `new_trace` not even once.
    """
    files = sorted(folder.glob(f"runs/*/{TRACE}"))
    limit = min(LIMIT, MAX_SPANS // max(1, len(files)))
    found: list[Panel] = []
    notes: list[str] = []
    runs = results["runs"]
    names = labels(runs)
    places = {
        (run.get("strategy"), run.get("world_size")): (label, index, color)
        for index, (run, label, color) in enumerate(zip(runs, names, palette(names), strict=True))
    }
    for file in files:
        try:
            state = file.stat()
            if state.st_size > MAX_FILE_BYTES:
                raise UsageError(
                    f"its trace file has {size(state.st_size)}: open it with `syncline trace view {file.parent}`"
                )
            made, key = _cached_panel(file, (state.st_mtime_ns, state.st_size), limit, new_trace)
            found.append(made.placed(*places[key]) if key in places else made)
        except Exception as error:  # a broken trace must not hide the results or the other traces
            why = str(error) if isinstance(error, UsageError) else one_line(f"{type(error).__name__}: {error}")
            if isinstance(error, OSError):
                why = f"cannot read {file.name}: {error.strerror}"
            notes.append(f"{file.parent.name} has no timeline: {why}")
    found.sort(key=lambda one: (one.index < 0, one.index))
    fastest = ranking(rows(results))
    # What the headline is about; a run of one rank exchanges nothing.
    order = [*with_several_ranks(that_train_well(fastest)), *fastest]
    by_speed = [number for row in order for number, one in enumerate(found) if one.label == row.label]
    return Traces(tuple(found), tuple(notes), opened=by_speed[0] if by_speed else 0)


_MAX_CACHED = 32
_cache: dict[tuple[Path, tuple[int, int], int], tuple[Panel, tuple[object, object]]] = {}


def _cached_panel(
    file: Path, state: tuple[int, int], limit: int, new_trace: Trace | None
) -> tuple[Panel, tuple[object, object]]:
    """The panel of a trace file, with strategy and world size; cached until `state` (its time and size) changes."""
    if (file, state, limit) not in _cache:
        source = new_trace
        if source is None or source.path.absolute() != file.absolute():
            source = load(file)
        if len(_cache) == _MAX_CACHED:
            del _cache[next(iter(_cache))]
        key = (source.metadata.get("strategy"), source.metadata.get("world_size"))
        _cache[file, state, limit] = panel(source, label=folder_label(file, source.metadata), limit=limit), key
    return _cache[file, state, limit]


def panel(source: Trace, *, label: str, limit: int = LIMIT, steps: tuple[int, int] | None = None) -> Panel:
    """The panel of a trace. `steps` keeps the steps in [first, last) and spans that overlap them."""
    analysis = _analysis(source, steps)
    spans = source.spans if steps is None else [s for of in prepare(source, steps=steps).spans.values() for s in of]
    chosen = excerpt(spans, limit=limit)
    units = sorted(analysis.get("units") or [], key=lambda unit: -(finite(unit.get("exposed_ms")) or 0.0))
    return Panel(
        label=label,
        index=-1,
        analysis=analysis,
        notes=tuple(str(note) for note in analysis.get("notes") or source.notes),
        command=f"syncline trace view {shlex.quote(str(source.path))} --steps {_left_out_steps(chosen.gap)}",
        excerpt=chosen.sentence,
        bars=_bars(analysis, finite(source.metadata.get("prediction_ms"))),
        ranks=_ranks(analysis.get("ranks") or []),
        units=tuple(units[:MAX_UNITS]),
        more_units=max(0, len(units) - MAX_UNITS),
        changes=tuple(changes(source.spans)),
        shape=shape_over_time(source.spans),
        data={
            "label": label,
            "spans": columns(chosen.spans, on_gpu=source.on_gpu),
            "gap": chosen.gap,
            "steady": (analysis.get("steps") or {}).get("steady_first") or 0,
            "steps": [
                [row["rank"], row["step"], *(round(finite(row["breakdown_ms"].get(p)) or 0.0, 4) for p in PHASES)]
                for row in analysis.get("per_step") or []
            ],
        },
    )


def folder_label(path: Path, metadata: Mapping[str, Any]) -> str:
    """Name of a trace that no results name: its strategy, or its folder or file."""
    strategy = metadata.get("strategy")
    if isinstance(strategy, str) and strategy:
        return strategy
    return path.parent.name if path.name.startswith("trace.json") and path.parent.name else path.name


def _left_out_steps(gap: tuple[int, int] | None) -> str:
    """Steps in the middle of those that are left out, in the form of the option `--steps`."""
    if gap is None:
        return "FIRST:LAST"
    middle = (gap[0] + gap[1]) // 2
    return f"{middle}:{min(middle + 20, gap[1] + 1)}"


def _analysis(source: Trace, steps: tuple[int, int] | None) -> dict[str, Any]:
    """The analysis as JSON. A trace that cannot be analysed still has a timeline, and the verdict says why."""
    try:
        return analyze(source, steps=steps).as_json(str(source.path))
    except UsageError as error:
        return {"verdict": {"kind": "unclear", "sentence": str(error), "recoverable_ms": None}, "notes": source.notes}


def _bars(analysis: Mapping[str, Any], predicted: float | None) -> list[dict[str, Any]]:
    """Measured, predicted and the bound, on one scale."""
    step = finite((analysis.get("step_ms") or {}).get("usual"))
    bound = analysis.get("bound") or {}
    best, compute, wire = (finite(bound.get(key)) for key in ("bound_ms", "compute_ms", "wire_ms"))
    if not step:
        return []
    found = [("measured", step, "mean step")]
    if predicted:
        off = step / predicted - 1
        found.append(("predicted", predicted, f"measured: {percent(abs(off))} {'more' if off > 0 else 'less'}"))
    if best:
        parts = [f"{name} {duration(ms)}" for name, ms in (("compute", compute), ("wire", wire)) if ms is not None]
        found.append(("bound", best, f"the longer of {' and '.join(parts)}" if len(parts) > 1 else " ".join(parts)))
    top = max(ms for _, ms, _ in found)
    return [{"name": name, "ms": ms, "width": round(100 * ms / top, 2), "note": note} for name, ms, note in found]


def _ranks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One strip per rank; its length is the rank's mean step relative to the longest of all ranks."""
    parts = [row.get("breakdown_ms") or {} for row in rows]
    top = max((sum(max(finite(ms.get(part)) or 0.0, 0.0) for part in PHASES) for ms in parts), default=0.0)
    return [
        {"rank": row["rank"], "step_ms": row.get("step_ms") or {}, "strip": shares_strip(ms, whole=top), "ms": ms}
        for row, ms in zip(rows, parts, strict=True)
    ]
