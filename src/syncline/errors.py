"""Errors and warnings that users see: UsageError, PeerError, RankFailure, SynclineWarning."""

import difflib
from collections.abc import Iterable

_LONGEST_NAME = 200


class UsageError(ValueError):
    """The request cannot be carried out; the message says what would work. The CLI exits with code 2."""


class DamagedCheckpoint(UsageError):
    """A checkpoint cannot be loaded; `train --resume` takes an older one."""


class RankFailure(RuntimeError):
    """A rank ended with an error or a signal. The message names the rank; `traceback` is its own."""

    def __init__(self, message: str, *, rank: int, summary: str, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.summary = summary
        self.traceback = traceback


class PeerError(RuntimeError):
    """A peer died, left or did not answer in time. The message names it; `ranks` are the ranks that it names."""

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class SynclineWarning(UserWarning):
    """Training continues, but not as requested; the message says what was found and what was done."""


def short(value: object, *, most: int = 80) -> str:
    """`repr` of a value for a message, cut after `most` characters.

    >>> short("x" * 100, most=12), short(1 << 100_000)
    ("'xxxxxxxx...", 'a number of 100001 bits')
    """
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print it
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def unknown(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """The error for a name that is not registered: the nearest match, then all names.

    >>> str(unknown("strategy", "dpp", ["ddp", "ring"]))
    "unknown strategy 'dpp': did you mean 'ddp'? (known: ddp, ring)"
    >>> str(unknown("strategy", "x", ["ddp", "ring"]))
    "unknown strategy 'x' (known: ddp, ring)"
    """
    known = sorted(choices)
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f": did you mean '{near[0]}'?" if near else ""
    return UsageError(f"unknown {kind} '{name}'{hint} (known: {', '.join(known)})")
