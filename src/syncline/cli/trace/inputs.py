"""The traces that a command works on: one, or those of all runs in a folder; and the steps of `--steps`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from syncline.errors import UsageError
from syncline.trace.formats.load import TRACE, runs

T = TypeVar("T")
Steps = tuple[int, int]
"""The first step, and the one after the last."""

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
