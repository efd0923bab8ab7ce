"""The command line: one verb a file, imported when it is used. Errors a user can mend are one line and exit code 2."""

import errno
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import typer

from syncline import __version__
from syncline.errors import UsageError

VERBS = {
    "train": "Train a model under one synchronisation strategy.",
    "compare": "Train the same model under several strategies and report what each costs and why.",
    "plan": "Find the plan of a job on a network, and say what was weighed and why.",
    "trace": "Say why steps take what they take: analyze, view, diff or export a trace.",
    "simulate": "Say what a recorded run would take without a straggler, on another network, with another codec.",
    "cluster": "Run a command on emulated nodes of this machine.",
    "report": "Show a finished run again: its tables, or its page.",
    "bench": "Measure codecs, what attaching and recording cost, and overlap against DDP.",
    "doctor": "Say what this machine can do, and what is missing.",
}

OWN_OPTIONS = {
    "bench overlap": "overlap",
    "trace export": "trace_export",
    "trace analyze": "trace_analyze",
    "trace diff": "trace_diff",
    "trace view": "trace_view",
}
"""What a verb does with options of its own, and the file that has them."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    """Entry point of `syncline`."""
    # As an exception, so that ranks, nodes and half-written files are put away first.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_root)
    called = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    following = " ".join(sys.argv[sys.argv.index(called, 1) :][:2]) if called else ""
    for name, text in VERBS.items():
        function = _function(OWN_OPTIONS.get(following, name)) if name == called else _placeholder
        extra = {"allow_extra_args": True, "allow_interspersed_args": False} if name == "cluster" else {}
        app.command(name, help=None if name == called else text, context_settings=extra)(function)
    app(prog_name="syncline")


def _version(value: bool) -> None:
    if value:
        print(f"syncline {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_version
    ),
) -> None:
    """Data-parallel training that is fast on the network you have, and explains itself."""


def _placeholder() -> None:
    """Stands for a verb that was not called, so that `--help` does not wait for its imports."""


def _function(name: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(f"syncline.cli.{name}"), name)
    except ModuleNotFoundError as error:
        print(f"syncline: {error}: pip install 'syncline[cli]'", file=sys.stderr)
        sys.exit(2)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UsageError as error:
            _complain(error)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("syncline: interrupted; what had finished is kept", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except OSError as error:
            # What names no file, such as a lost connection, is no slip of the user's.
            if error.filename is None and error.errno not in _FULL:
                raise
            place = "" if error.filename is None else f"'{os.fsdecode(error.filename)}': "
            _complain(f"{place}{error.strerror or error}")
            raise typer.Exit(2) from None

    return guarded


def _complain(text: object) -> None:
    """One line on standard error; names in it may come from a file that somebody else wrote."""
    from syncline.report.figures import printable

    print(f"syncline: {printable(text)}", file=sys.stderr)


if __name__ == "__main__":
    main()
