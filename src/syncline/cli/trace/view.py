"""`syncline trace view`: a page with the timeline of a trace, written to a file or served to this machine alone."""

import webbrowser
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.app import new_app
from syncline.cli.output import say
from syncline.cli.trace.inputs import LimitOption, Steps, load_each, parse_limits, parse_steps, several_runs
from syncline.errors import UsageError
from syncline.files import real_path, write_text
from syncline.report.figures import one_line, size
from syncline.report.html import render_view
from syncline.report.panels import folder_label, panel
from syncline.trace.formats.json_stream import Limits
from syncline.trace.formats.load import TRACE, load
from syncline.trace.merge.merge_ranks import Trace

PAGE = "timeline.html"
"""The name of the page beside its trace."""

LIMIT = 400_000
"""The most spans of a page: more than a report's, and it still opens in a few seconds."""

HOST = "127.0.0.1"

app = new_app()


@app.command()
def view(
    run: Annotated[
        Path,
        typer.Argument(help=f"A run folder, a strategy's folder, a {TRACE}, a torch.profiler or Horovod trace."),
    ],
    steps: Annotated[str, typer.Option(help="Only these steps: 10:20 is 10 to 19, 10: all from 10 on.")] = "",
    limit: LimitOption = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help=f"Where to write the page; default: {PAGE} beside the trace.")
    ] = None,
    serving: Annotated[
        bool, typer.Option("--serve", help="Serve the page on 127.0.0.1 until Ctrl-C instead of writing it.")
    ] = False,
    port: Annotated[int, typer.Option(help="With --serve: the port; 0 takes a free one.")] = 0,
    opening: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show a trace as an interactive timeline, with the verdict and the breakdown of each step."""
    if serving and out is not None:
        raise UsageError("--serve writes no file: leave out -o")
    if port and not serving:
        raise UsageError("--port is for --serve: add it")
    if not 0 <= port < 65536:
        raise UsageError(f"--port must be 0 to 65535, not {port}")
    if out is not None and out.is_dir():
        raise UsageError(f"-o {out} is a folder: name a file in it")
    chosen, limits = parse_steps(steps), parse_limits(limit)
    several = several_runs(run)
    found, notes = load_each(several, lambda folder: _load(folder, chosen, limits), run) if several else ({}, [])
    sources = list(found.values()) or [_load(run, chosen, limits)]
    text = _page(sources, path=run, steps=chosen, notes=notes)
    if serving:
        _serve(text, port=port, opening=opening)
        return
    target = out or (sources[0].folder if len(sources) == 1 else run) / PAGE
    if target.exists() and any(target.samefile(source.path) for source in sources):
        raise UsageError(f"-o {target} is the trace itself: name another file")
    try:
        write_text(text, target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}; name another file with -o") from None
    say("\n".join([*(f"note: {note}" for note in notes), f"timeline: {target} ({size(len(text.encode()))})"]))
    if opening:
        webbrowser.open(target.resolve().as_uri())


def _load(path: Path, steps: Steps | None, limits: Limits | None) -> Trace:
    source = load(path, limits=limits)
    if steps is not None and not any(steps[0] <= span.step < steps[1] for span in source.spans):
        last = max(span.step for span in source.spans)
        raise UsageError(f"{source.path} has no span of these steps: name some with --steps, up to {last}")
    return source


def _page(sources: Sequence[Trace], *, path: Path, steps: Steps | None, notes: Sequence[str]) -> str:
    """The page of one trace, or of several runs in a folder; `notes` name the runs that are missing."""
    panels = []
    for index, source in enumerate(sources):
        label = folder_label(source.path, source.metadata)
        made = panel(source, label=label, limit=LIMIT // len(sources), steps=steps)
        panels.append(made.placed(label, index, index) if len(sources) > 1 else made)
    kind = sources[0].metadata.get("imported")
    name = panels[0].label if len(panels) == 1 else real_path(path).name
    title = f"{name}: timeline" + (f" of {kind}" if isinstance(kind, str) else "")
    shown = str(sources[0].path if len(sources) == 1 else path)
    return render_view(panels, title=one_line(title), source=shown, notes=notes)


def _serve(text: str, *, port: int, opening: bool) -> None:
    """Serve `text` as the page at `/` until it is interrupted."""
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(text.encode()))
    except OSError as error:
        raise UsageError(f"cannot serve on port {port}: {error.strerror}; leave out --port for a free one") from None
    with server:
        address = f"http://{HOST}:{server.server_port}/"
        say(f"serving {address} to this machine alone; Ctrl-C ends it")
        if opening:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")


def _handler(page: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "syncline", ""

        def do_GET(self) -> None:
            # Another site could point its own host name at this address and read the page: accept our names only.
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    return Handler
