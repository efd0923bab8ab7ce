"""From results to what people look at: the console summary and the HTML page."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.files import write_text
from syncline.report.figures import printable
from syncline.report.remarks import cautions
from syncline.report.verdict import headline, verdicts
from syncline.results.schema import Results

if TYPE_CHECKING:
    from rich.console import Console


def render_html(results: Results, *, folder: Path | None = None) -> str:
    """The self-contained page as text, with the timelines of the traces in the run folder, if it is given."""
    from syncline.report.html import render
    from syncline.report.traces import traces

    return render(results, traced=None if folder is None else traces(results, folder))


def write_html(results: Results, path: str | os.PathLike[str], *, folder: Path | None = None) -> None:
    """Write the page to `path` in one move; the run folder, where the traces are, is that of `path` if not given."""
    write_text(render_html(results, folder=folder or Path(path).parent), path)


def print_summary(results: Results, console: "Console") -> None:
    """Tables first, then a verdict for each strategy, then what to beware of."""
    from rich.text import Text

    from syncline.report import tables

    tables.show(console, [*tables.comparison(results, width=console.width), *tables.scaling(results)])
    console.print(Text(printable(headline(results)), style="bold"))
    for verdict in verdicts(results):
        line = Text("- ") + Text(printable(verdict.label), style="bold") + Text(": " + printable(verdict.sentence))
        console.print(line, style=None if verdict.ok else "red")
        for remark in verdict.remarks:
            console.print(Text(f"  {printable(remark)}"), style="dim")
    for caution in [*results.get("warnings", []), *cautions(results)]:
        console.print(Text(f"Note: {printable(caution)}", style="yellow"))
