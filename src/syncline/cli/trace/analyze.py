"""`syncline trace analyze`: where the time of a step goes, why, and what could be gained."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli.app import new_app
from syncline.cli.output import print_json
from syncline.cli.trace import analysis_tables
from syncline.cli.trace.flight import find_dumps, print_flight
from syncline.cli.trace.inputs import LimitOption, Steps, load_each, parse_limits, parse_steps, several_runs
from syncline.errors import UsageError
from syncline.report.scaling import StartUp, curves, start_up
from syncline.results import file as results_file
from syncline.results.schema import Results
from syncline.trace.analysis.analyze import Analysis
from syncline.trace.analysis.analyze import analyze as analyze_trace
from syncline.trace.analysis.flight import diagnose
from syncline.trace.formats.flight_read import read_dumps
from syncline.trace.formats.json_stream import Limits
from syncline.trace.formats.load import TRACE, load

app = new_app()


@app.command()
def analyze(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help=f"A run folder, a {TRACE}, or a trace of another tool: a torch.profiler file, a folder with one file"
            " per rank, a Horovod timeline; or PyTorch's flight-recorder dumps, one file per rank.",
        ),
    ],
    steps: Annotated[str, typer.Option(help="Only these steps: 10:20 is 10 to 19, 10: all from 10 on.")] = "",
    run: Annotated[str | None, typer.Option(help="One run of a folder that holds several.")] = None,
    top: Annotated[int, typer.Option(help="Number of units and of parts of the critical path to show.")] = 10,
    limit: LimitOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the analysis as JSON and nothing else.")] = False,
) -> None:
    """Analyse a trace: the verdict, then the breakdown, late ranks, units, start-up, critical path and bound."""
    chosen, limits = parse_steps(steps), parse_limits(limit)
    if top < 1:
        raise UsageError(f"--top must be at least 1, not {top}")
    console = Console(highlight=False, emoji=False)
    if dumps := find_dumps(path):
        if chosen is not None or run is not None or limits is not None:
            raise UsageError(
                f"{path} holds flight-recorder dumps, without steps and runs: leave out --steps, --run and --limit"
            )
        diagnosis = diagnose(read_dumps(dumps))
        if as_json:
            print_json(diagnosis.as_json(str(path)))
        else:
            print_flight(console, diagnosis, str(path), top=top)
        return
    several = several_runs(path) if run is None else []
    if not several:
        source, analysis = _analyze(path, run, chosen, limits)
        if as_json:
            print_json(analysis.as_json(source))
        else:
            start, notes = _start_up(Path(source), analysis)
            analysis = replace(analysis, notes=(*analysis.notes, *notes))
            analysis_tables.print_run(console, analysis, source, top=top, start=start)
        return
    found, notes = load_each(several, lambda folder: _analyze(folder, None, chosen, limits), path)
    results, more_notes = _results(path)
    notes += more_notes
    if as_json:
        rows = [analysis.as_json(source) for source, analysis in found.values()]
        scaling = [] if results is None else curves(results)
        points = [{"strategy": curve.strategy, **vars(point)} for curve in scaling for point in curve.points]
        for point in points:
            del point["run"]
        print_json({"runs": rows, "scaling": points, "notes": notes})
    else:
        analyses = {name: analysis for name, (_, analysis) in found.items()}
        analysis_tables.print_runs(console, analyses, results, path, notes=notes)


def _analyze(path: Path, run: str | None, steps: Steps | None, limits: Limits | None) -> tuple[str, Analysis]:
    source = load(path, run=run, limits=limits)
    try:
        analysis = analyze_trace(source, steps=steps)
    except UsageError as error:
        raise UsageError(f"{source.path}: {error}") from None
    return str(source.path), analysis


def _results(folder: Path) -> tuple[Results | None, list[str]]:
    """The results of a run folder, and a note if they cannot be used. The analysis does not need them."""
    if not (folder / results_file.FILE_NAME).is_file():
        return None, []
    try:
        return results_file.load(folder), []
    except UsageError as error:
        return None, [f"the run's results are not used: {error}"]


def _start_up(trace: Path, analysis: Analysis) -> tuple[StartUp | None, list[str]]:
    """The time before the first step and of the epochs, from the run's results."""
    above = trace.absolute().parent.parent
    if trace.name != TRACE or above.name != "runs":
        return None, []
    results, notes = _results(above.parent)
    rows = [] if results is None else [run for run in results["runs"] if results_file.ok(run)]
    own = (analysis.strategy, analysis.world_size)
    found = [run for run in rows if (run["strategy"], run["world_size"]) == own]
    return start_up(found[0]) if len(found) == 1 else None, notes
