"""Errors that a user can mend: one sentence, with the fix in it."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """What the user asked for cannot be done; the message says what would work. The CLI exits with 2."""


class RankFailure(RuntimeError):
    """One rank ended with an error or a signal; the message names it and carries its traceback."""

    def __init__(self, message: str, *, rank: int, summary: str, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.summary = summary
        self.traceback = traceback


class PeerError(RuntimeError):
    """A peer died, stopped or did not come; the message names it, `ranks` holds the ranks that it names."""

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class SynclineWarning(UserWarning):
    """Training goes on, but not as it was asked for; the message says what was found and what was done."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """The error for a name that is not registered: nearest match first, then all the names.

    >>> str(unknown("strategy", "dpp", ["ddp", "ring"]))
    "unknown strategy 'dpp': did you mean 'ddp'? (known: ddp, ring)"
    """
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return UsageError(f"unknown {kind} '{name}': {hint}(known: {', '.join(known)})")
