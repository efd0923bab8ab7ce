"""Typer apps whose commands are imported when they are called, and whose errors are one line with exit code 2."""

import errno
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from syncline import trust
from syncline.errors import PeerError, RankFailure, UsageError, unknown
from syncline.report.figures import printable

_LONGEST_LINE = 4000
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_HINTS = {
    **dict.fromkeys(_DISK_FULL, "; free some space, then start again, or train --resume RUN if it has checkpoints"),
    errno.EROFS: "; choose a folder that can be written",
}
# Typer's error for wrong arguments. Some versions of Typer take it from click, others bring their own.
_ArgumentError: Any = typer.BadParameter.__mro__[1]


class Group(TyperGroup):
    """A group of commands. An error that the user can fix becomes one line on standard error and exit code 2."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` begins with; a misspelled name is an error with the nearest match."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            raise unknown("command", args[0], names)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands for the help page, each with its whole first sentence."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(ctx, name)) for name in self.list_commands(ctx)])

    def summary(self, ctx: Any, name: str) -> str:
        """One sentence about a command."""
        command = self.get_command(ctx, name)
        return ((command and command.help) or "").split("\n")[0]

    def invoke(self, ctx: Any) -> Any:
        """Run the command, with its errors reported."""
        with _reported_errors():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command that imports a user's own code only if an option names it, or with `--trust`."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; names in paths and files do not count as given by the user."""
        options = {name: value for name, value in ctx.params.items() if name != "recipe"}
        values = [item for value in options.values() for item in (value if isinstance(value, list) else [value])]
        texts = [value for value in values if isinstance(value, str)]
        with trust.command_line(texts, everything=bool(options.get("trust_files"))):
            return super().invoke(ctx)


class App(typer.Typer):
    """A Typer app whose commands are of the class `Command`."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Decorator: add a command."""
        return super().command(name, cls=Command, **options)


class LazyGroup(Group):
    """Commands that live in one module each. The help page does not import them."""

    package: ClassVar[str]
    """The package of the modules; each is named like its command and has an `app`."""
    summaries: ClassVar[Mapping[str, str]]
    """For each command, one sentence for the help page."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(self.summaries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command."""
        if cmd_name not in self.summaries:
            return None
        try:
            return typer.main.get_command(import_module(f"{self.package}.{cmd_name}").app)
        except ModuleNotFoundError as error:
            raise UsageError(f"{error}: pip install 'syncline[cli]'") from error

    def summary(self, ctx: Any, name: str) -> str:
        """The sentence for the help page."""
        return self.summaries[name]


def new_app(group: type[Group] = Group) -> typer.Typer:
    """A Typer app with plain-text help pages and ordinary tracebacks."""
    return App(cls=group, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@contextmanager
def _reported_errors() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        _complain(error)
        raise typer.Exit(2) from None
    except PeerError as error:
        _complain(f"{error}; what had finished is kept")
        raise typer.Exit(1) from None
    except RankFailure as failure:
        if failure.traceback:
            print(printable(failure.traceback).rstrip(), file=sys.stderr)
        _complain(failure)
        raise typer.Exit(1) from None
    except _ArgumentError as error:
        _complain(f"{_message(error)}; see {_command_path(error)} --help")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("syncline: interrupted; what had finished is kept", file=sys.stderr)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except OSError as error:
        # An error without a file name, such as a lost connection, is not a mistake of the user.
        if error.filename is None and error.errno not in _DISK_FULL:
            raise
        place = "" if error.filename is None else f"'{os.fsdecode(error.filename)}': "
        hint = _HINTS.get(error.errno or 0, "")
        _complain(f"{place}{error.strerror or error}{hint}")
        raise typer.Exit(2) from None


def _command_path(error: Any) -> str:
    """The command with the wrong arguments; the parser does not always say which one it is."""
    return "syncline" if error.ctx is None else str(error.ctx.command_path)


def _message(error: Any) -> str:
    if getattr(error, "option_name", None) == "--from":
        return f"there is no --from: the run is the argument, {_command_path(error)} RUN"
    text: str = error.format_message().rstrip(".")
    # Typer's parser quotes its library: "Input should be a valid integer, unable to parse string as an integer".
    for kind, ours in (("integer", "a whole number"), ("number", "a number"), ("boolean", "true or false")):
        text = re.sub(rf"^Invalid value for '([^']+)': Input should be a valid {kind}\b.*", rf"\1 takes {ours}", text)
    return text[:1].lower() + text[1:]


def _complain(text: object) -> None:
    """Write one line to standard error. Names in it may come from a file that somebody else wrote."""
    line = printable(text)
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]}..."
    print(f"syncline: {line}", file=sys.stderr)
