"""`syncline trace view`: the timeline of a trace as a page, as a file or served to this machine alone."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli.serve import serve
from syncline.cli.trace_analyze import chosen_steps
from syncline.errors import UsageError
from syncline.files import write_text
from syncline.report.figures import one_line, printable, size
from syncline.report.html import render_view
from syncline.report.panels import folder_label, panel
from syncline.trace.formats.load import TRACE, Source, find, runs

PAGE = "timeline.html"
"""What the page is called beside its trace."""

LIMIT = 400_000
"""Spans that the page holds at most: more than a report's, and still opened in a few seconds."""


def trace_view(
    what: Annotated[str, typer.Argument(metavar="view", help="Make a page with the timeline of a trace.")],
    run: Annotated[
        Path,
        typer.Argument(help=f"A run folder, a strategy's folder, a {TRACE}, a torch.profiler or Horovod trace."),
    ],
    steps: Annotated[str, typer.Option(help="Only these steps: 10:20 is 10 to 19, 10: all from 10 on.")] = "",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help=f"Where to write the page; default: {PAGE} beside the trace.")
    ] = None,
    serving: Annotated[
        bool, typer.Option("--serve", help="Serve the page on 127.0.0.1 until Ctrl-C instead of writing it.")
    ] = False,
    port: Annotated[int, typer.Option(help="With --serve: the port; 0 takes a free one.")] = 0,
    opening: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show a trace as an interactive timeline, with the verdict and where each step went."""
    del what
    if serving and out is not None:
        raise UsageError("--serve writes no file: leave out -o")
    if port and not serving:
        raise UsageError("--port is for --serve: add it")
    if not 0 <= port < 65536:
        raise UsageError(f"--port must be 0 to 65535, not {port}")
    if out is not None and out.is_dir():
        raise UsageError(f"-o {out} is a folder: name a file in it")
    chosen = chosen_steps(steps)
    sources, notes = _sources(run, chosen)
    text = page(sources, path=run, steps=chosen, notes=notes)
    console = Console()
    if serving:
        serve(text, port=port, opening=opening, say=lambda line: _say(console, line))
        return
    target = out or (sources[0].folder if len(sources) == 1 else run) / PAGE
    if target.exists() and any(target.samefile(source.path) for source in sources):
        raise UsageError(f"-o {target} is the trace itself: name another file")
    try:
        write_text(text, target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}; name another file with -o") from None
    for note in notes:
        _say(console, f"note: {note}")
    _say(console, f"timeline: {target} ({size(len(text.encode()))})")
    if opening:
        webbrowser.open(target.resolve().as_uri())


def page(
    sources: Sequence[Source], *, path: Path, steps: tuple[int, int] | None = None, notes: Sequence[str] = ()
) -> str:
    """The page of one trace, or of the runs in a folder, as text; `notes` say which of them are missing."""
    panels = []
    for index, source in enumerate(sources):
        label = folder_label(source.path, source.metadata)
        made = panel(source, label=label, limit=LIMIT // len(sources), steps=steps)
        panels.append(made.placed(label, index) if len(sources) > 1 else made)
    kind = sources[0].metadata.get("imported")
    name = panels[0].label if len(panels) == 1 else path.resolve().name
    title = f"{name}: timeline" + (f" of {kind}" if isinstance(kind, str) else "")
    shown = str(sources[0].path if len(sources) == 1 else path)
    return render_view(panels, title=one_line(title), source=shown, notes=notes)


def _sources(path: Path, steps: tuple[int, int] | None) -> tuple[list[Source], list[str]]:
    """The traces, and why some of several are left out."""
    several = runs(path) if path.is_dir() and not (path / TRACE).is_file() else []
    found: list[Source] = []
    notes: list[str] = []
    for folder in several if len(several) > 1 else [path]:
        try:
            found.append(_source(folder, steps))
        except (UsageError, OSError) as error:
            if len(several) <= 1:
                raise
            notes.append(f"{folder.name} is left out: {error}")
    if not found:
        raise UsageError(f"none of the {len(several)} runs in {path} can be shown; {notes[0]}")
    return found, notes


def _source(path: Path, steps: tuple[int, int] | None) -> Source:
    source = find(path)
    if steps is not None and not any(steps[0] <= span.step < steps[1] for span in source.spans):
        last = max(span.step for span in source.spans)
        raise UsageError(f"{source.path} has no span of these steps: name some with --steps, up to {last}")
    return source


def _say(console: Console, line: str) -> None:
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
