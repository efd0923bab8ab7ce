"""`syncline trace export`: write the trace of a run for other tools."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli.app import new_app
from syncline.cli.output import print_json, say
from syncline.cli.trace.inputs import LimitOption, parse_limits
from syncline.errors import UsageError, unknown
from syncline.trace.formats.chrome_events import Event, write_events
from syncline.trace.formats.chrome_write import chrome_events, chrome_head
from syncline.trace.formats.horovod_write import horovod_trace
from syncline.trace.formats.load import TRACE, load
from syncline.trace.merge.merge_ranks import Trace
from syncline.wording import plural

_STYLES = ("chrome", "horovod")


app = new_app()


@app.command()
def export(
    run: Annotated[
        Path,
        typer.Argument(help=f"A run folder, a strategy's folder in it, a {TRACE}, or a folder with a file per rank."),
    ],
    style: Annotated[
        str,
        typer.Option(
            help="chrome: one process per rank, one track per lane. horovod: one row per tensor, with Horovod's names."
        ),
    ] = "chrome",
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="The file, compressed if it ends in .gz; default: beside the run."),
    ] = None,
    limit: LimitOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON and nothing else.")] = False,
) -> None:
    """Export the spans of all ranks as one trace that chrome://tracing and Perfetto open."""
    if style not in _STYLES:
        raise unknown("style", style, _STYLES)
    source = load(run, limits=parse_limits(limit))
    target = out or source.folder / f"trace.{style}.json.gz"
    if target.is_dir():
        raise UsageError(f"-o {target} is a folder: name a file in it")
    if target.exists() and target.samefile(source.path):
        raise UsageError(f"-o {target} is the trace itself: name another file")
    told = {"source": str(source.path), "file": str(target), "style": style} | _export(source, style, target)
    if as_json:
        print_json(told)
        return
    lines = [f"note: {text}" for text in told["notes"]]
    counts = plural(told["spans"], "span"), plural(len(told["ranks"]), "rank"), plural(told["events"], "event")
    lines.append("{} of {}, {}".format(*counts))
    lines.append(f"trace: {target}")
    say("\n".join(lines))


def _export(source: Trace, style: str, target: Path) -> dict[str, Any]:
    """Write the file; returns counts of what it holds."""
    events, head, notes = _content(source, style)
    phases: Counter[str] = Counter()
    tracks: set[tuple[int, int]] = set()

    def counted() -> Iterator[Event]:
        for event in events:
            phases[event["ph"]] += 1
            if event["ph"] in "BX":
                tracks.add((event["pid"], event["tid"]))
            yield event

    try:
        write_events(counted(), target, head=head)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}; name another file with -o") from None
    steps = [span.step for span in source.spans]
    return {
        "bytes": target.stat().st_size,
        "spans": len(source.spans),
        "events": phases.total(),
        "ranks": sorted({span.rank for span in source.spans}),
        "steps": [min(steps), max(steps)] if steps else [],
        "tracks": len(tracks),
        "arrows": phases["s"],
        "clock_error_ns": source.metadata.get("clock_error_ns"),
        "notes": [*source.notes, *notes],
    }


def _content(source: Trace, style: str) -> tuple[Iterable[Event], dict[str, Any] | None, list[str]]:
    """The events, the head of the file, and notes for the user."""
    if style == "chrome":
        noted = replace(source, metadata={**source.metadata, "notes": list(source.notes)})
        return chrome_events(noted), chrome_head(noted), []
    backend = source.metadata.get("backend")
    if isinstance(backend, str) and backend:
        return horovod_trace(source, backend=backend), None, []
    return horovod_trace(source), None, ["the trace does not name its backend: transfers are written as GLOO's"]
