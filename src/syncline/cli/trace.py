"""`syncline trace`: what can be done with a trace; each action has a file and options of its own."""

from typing import Annotated

import typer

from syncline.errors import unknown

ACTIONS = {
    "export": "Write it for chrome://tracing or Perfetto, also in Horovod's style.",
    "analyze": "Say where a step's time goes, why, and what could be gained.",
    "diff": "Compare two traces phase by phase; the exit code is for CI.",
    "view": "Make a page with the timeline and the diagnosis, or serve it here.",
}


def trace(
    what: Annotated[
        str, typer.Argument(metavar="ACTION", help=" ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    ],
    rest: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Do something with the trace of a run; `syncline trace ACTION --help` has the options of each."""
    del rest
    raise unknown("action", what, tuple(ACTIONS))
