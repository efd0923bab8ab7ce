"""The traces that a command works on: one, or those of all runs in a folder; the options `--steps` and `--limit`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from syncline.errors import UsageError, unknown
from syncline.trace.formats.json_stream import Limits
from syncline.trace.formats.load import TRACE, runs

T = TypeVar("T")
Steps = tuple[int, int]
"""The first step, and the one after the last."""

LimitOption = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="NAME=NUMBER", help="Read more of a large file: spans=2000000, bytes, events ..."),
]
"""The option `--limit`, which can be repeated."""

_STEPS = re.compile(r"(\d{0,9}):(\d{0,9})", re.ASCII)


def parse_steps(text: str) -> Steps | None:
    """The steps of `10:20` or `10:`; None for an empty text."""
    if not text:
        return None
    found = _STEPS.fullmatch(text)
    if found is None:
        raise UsageError(f"--steps takes two numbers with a colon, such as 10:20 or 10:, not '{text}'")
    first, last = int(found[1] or 0), int(found[2] or 1 << 62)
    if last <= first:
        raise UsageError(f"--steps {text} holds no step: the second number must be the larger one")
    return first, last


def parse_limits(texts: Sequence[str] | None) -> Limits | None:
    """The limits of `spans=2000000` and the like; None without any, which leaves each format its own."""
    names = [field.name for field in fields(Limits)]
    found: dict[str, int] = {}
    for text in texts or ():
        name, _, number = text.partition("=")
        if name not in names:
            raise unknown("limit", name, names)
        if not (number.isascii() and number.isdigit() and 0 < int(number) < 1 << 62):
            raise UsageError(f"--limit {text}: write a name and a number, such as spans=2000000")
        found[name] = int(number)
    return Limits(**found) if found else None


def several_runs(path: Path) -> list[Path]:
    """The folders of the runs in a run folder, if it holds more than one."""
    found = runs(path) if path.is_dir() and not (path / TRACE).is_file() else []
    return found if len(found) > 1 else []


def load_each(folders: list[Path], load: Callable[[Path], T], path: Path) -> tuple[dict[str, T], list[str]]:
    """What `load` makes of each run in `path`, by name, and notes on those that cannot be read."""
    found: dict[str, T] = {}
    notes: list[str] = []
    for folder in folders:
        try:
            found[folder.name] = load(folder)
        except (UsageError, OSError) as error:
            notes.append(f"{folder.name} is left out: {error}")
    if not found:
        raise UsageError(f"none of the {len(folders)} runs in {path} can be read; {notes[0]}")
    return found, notes
