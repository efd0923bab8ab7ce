"""`syncline report`: show the tables of a finished run and write its page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli.app import new_app
from syncline.cli.output import print_json, say
from syncline.errors import UsageError
from syncline.report.html import write_html
from syncline.report.tables import print_summary
from syncline.results import file as results_file

app = new_app()


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or its results.json.")],
    html: Annotated[
        Path | None, typer.Option(help="Where to write the page; default: report.html in the folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")] = False,
) -> None:
    """Show a finished run again: print its tables, and write its page report.html."""
    results = results_file.load(run)
    if as_json:
        print_json(results)
        return
    if html is not None and html.is_dir():
        raise UsageError(f"--html {html} is a folder: name a file in it")
    folder = run if run.is_dir() else run.parent
    target = html or folder / "report.html"
    write_html(results, target, folder=folder)
    console = Console()
    print_summary(results, console)
    say(f"report: {target}", console)
