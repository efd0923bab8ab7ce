"""Progress of a long command: lines as they come, and on a terminal below them a spinner with the elapsed time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from syncline.cli.output import say
from syncline.report.figures import one_line

Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress: only the result, notes and warnings.")]
"""The option `--quiet` of commands that take long."""


@contextmanager
def progress_lines(console: Console, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A function that shows a line of progress; with `quiet` it shows nothing."""
    if quiet:
        yield lambda _: None
        return
    if not console.is_terminal:
        yield lambda text: say(text, console)
        return
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting")

        def line(text: str) -> None:
            say(text, console)
            shown.update(task, description=f"since: {escape(one_line(text, limit=max(20, console.width - 24)))}")

        yield line
