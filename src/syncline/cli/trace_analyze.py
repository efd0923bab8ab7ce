"""`syncline trace analyze`: where a step's time goes, why, and what could be gained."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from syncline.cli.analysis_tables import one_run, several_runs
from syncline.cli.execute import print_json
from syncline.errors import UsageError
from syncline.report.scaling import Curve, StartUp, curves, start_up
from syncline.results import file as results_file
from syncline.results.schema import Results
from syncline.trace.analysis.analysis import Analysis, analyze
from syncline.trace.formats.load import TRACE, find, runs

_STEPS = re.compile(r"(\d{0,9}):(\d{0,9})", re.ASCII)


def trace_analyze(
    what: Annotated[str, typer.Argument(metavar="analyze", help="Say where a step's time goes, and why.")],
    path: Annotated[
        Path,
        typer.Argument(
            help=f"A run folder, a {TRACE}, or traces of others: a file of torch.profiler's, a folder with one a rank,"
            " a Horovod timeline."
        ),
    ],
    steps: Annotated[str, typer.Option(help="Only these steps: 10:20 is 10 to 19, 10: all from 10 on.")] = "",
    run: Annotated[str | None, typer.Option(help="One run of a folder that holds several.")] = None,
    top: Annotated[int, typer.Option(help="How many units and pieces of the critical path to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the analysis as JSON and nothing else.")] = False,
) -> None:
    """Analyse a trace: a verdict, and the breakdown, late ranks, units, start-up, critical path and bound behind it."""
    del what
    chosen = chosen_steps(steps)
    if top < 1:
        raise UsageError(f"--top must be at least 1, not {top}")
    console = Console(highlight=False, emoji=False)
    several = runs(path) if run is None and path.is_dir() and not (path / TRACE).is_file() else []
    if len(several) > 1:
        found, notes = _each(several, chosen, path)
        results, told_of_it = _results(path)
        scaling = [] if results is None else curves(results)
        notes += told_of_it
        if as_json:
            rows = [told.as_json(source) for source, told in found.values()]
            points = [row for curve in scaling for row in _points(curve)]
            print_json({"runs": rows, "scaling": points, "notes": notes})
        else:
            several_runs(console, {name: told for name, (_, told) in found.items()}, scaling, path, notes=notes)
        return
    source, told = _analyze(path, run, chosen)
    if as_json:
        print_json(told.as_json(source))
    else:
        start, notes = _start(Path(source), told)
        one_run(console, replace(told, notes=(*told.notes, *notes)), source, top=top, start=start)


def _analyze(path: Path, run: str | None, steps: tuple[int, int] | None) -> tuple[str, Analysis]:
    source = find(path, run=run)
    try:
        told = analyze(source.spans, metadata=source.metadata, notes=source.notes, steps=steps)
    except UsageError as error:
        raise UsageError(f"{source.path}: {error}") from None
    return str(source.path), told


def _each(
    folders: Sequence[Path], steps: tuple[int, int] | None, path: Path
) -> tuple[dict[str, tuple[str, Analysis]], list[str]]:
    """The runs that can be analysed, by name, and why others cannot."""
    found: dict[str, tuple[str, Analysis]] = {}
    notes: list[str] = []
    for folder in folders:
        try:
            found[folder.name] = _analyze(folder, None, steps)
        except (UsageError, OSError) as error:
            notes.append(f"{folder.name} is left out: {error}")
    if not found:
        raise UsageError(f"none of the {len(folders)} runs in {path} can be analysed; {notes[0]}")
    return found, notes


def chosen_steps(text: str) -> tuple[int, int] | None:
    """The first step and the one behind the last of `10:20`; nothing where nothing was asked."""
    if not text:
        return None
    found = _STEPS.fullmatch(text)
    if found is None:
        raise UsageError(f"--steps takes two numbers with a colon, such as 10:20 or 10:, not '{text}'")
    first, last = int(found[1] or 0), int(found[2] or 1 << 62)
    if last <= first:
        raise UsageError(f"--steps {text} holds no step: the second number must be the larger one")
    return first, last


def _results(folder: Path) -> tuple[Results | None, list[str]]:
    """The results of a run folder; without them an analysis is still one, so what is wrong with them is a note."""
    if not (folder / results_file.FILE_NAME).is_file():
        return None, []
    try:
        return results_file.load(folder), []
    except UsageError as error:
        return None, [f"the run's results are not used: {error}"]


def _start(trace: Path, told: Analysis) -> tuple[StartUp | None, list[str]]:
    """What the run's results say of the time before the first step, and of its epochs."""
    above = trace.absolute().parent.parent
    if trace.name != TRACE or above.name != "runs":
        return None, []
    results, notes = _results(above.parent)
    rows = [] if results is None else [run for run in results["runs"] if results_file.ok(run)]
    mine = [run for run in rows if (run["strategy"], run["world_size"]) == (told.strategy, told.world_size)]
    return start_up(mine[0]) if len(mine) == 1 else None, notes


def _points(curve: Curve) -> list[dict[str, Any]]:
    return [
        {
            "strategy": curve.strategy,
            "world_size": point.world_size,
            "step_ms": point.step_ms,
            "first_epoch_s": point.first_epoch_s,
            "later_epoch_s": point.later_epoch_s,
            "samples_per_s": point.samples_per_s,
            "speedup": point.speedup,
            "efficiency": point.efficiency,
            "whole_s": point.whole_s,
            "whole_speedup": point.whole_speedup,
        }
        for point in curve.points
    ]
