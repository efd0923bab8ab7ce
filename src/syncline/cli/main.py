"""The command line `syncline`: its verbs, each in a module of its own that is imported when it is called."""

import signal
import sys
from typing import ClassVar

import typer

from syncline import __version__
from syncline.cli.app import LazyGroup, new_app


class Verbs(LazyGroup):
    """The verbs of `syncline`."""

    package = "syncline.cli"
    summaries: ClassVar = {
        "train": "Train a model with one synchronisation strategy.",
        "compare": "Train the same model with several strategies and report what each costs and why.",
        "plan": "Find the best plan for a job on a network, and explain the choice.",
        "trace": "Explain where the time of a step goes: analyze, view, diff or export a trace.",
        "simulate": "Predict a recorded run without a straggler, on another network, with another codec.",
        "cluster": "Run a command on emulated nodes of this machine.",
        "report": "Show a finished run again: its tables and its page.",
        "bench": "Measure codecs, the cost of attaching and recording, and overlap against DDP.",
        "list": "List codecs, exchanges, strategies, models, data, optimizers or recipes, with their arguments.",
        "doctor": "Show what this machine can do, and what is missing.",
    }


app = new_app(Verbs)


def main() -> None:
    """Entry point of `syncline`."""
    # Signals become an exception, so that ranks, nodes and half-written files are cleaned up first.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    app(prog_name="syncline")


def _show_version(value: bool) -> None:
    if value:
        print(f"syncline {__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def _root(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
    ),
) -> None:
    """Data-parallel training that is fast on the network you have, and explains itself."""


if __name__ == "__main__":
    main()
