"""`SYNCLINE_TRACE=path` (and `SYNCLINE_TRACE_EVERY=n`): recording without a change to the script.

An attached model is recorded from its first step on. A script that imports Syncline and trains otherwise is recorded
from the second step on: the first one shows that this process trains at all, which data loaders' workers do not.
"""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.util import Finalize

import torch
from torch import nn

from syncline.errors import UsageError
from syncline.trace.record.session import current, start

PATH, EVERY = "SYNCLINE_TRACE", "SYNCLINE_TRACE_EVERY"
_off = False


def prepare() -> None:
    """Record from the first step on that somebody takes in this process; on import, where the variable is set."""
    if _off or not os.environ.get(PATH) or current() is not None:
        return
    start(os.environ[PATH], every=_every()).when_begun = _begun
    atexit.register(_at_exit)


def attached(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """A model was attached: record it if the variable says so."""
    if _off or not os.environ.get(PATH):
        return
    prepare()
    under_way = current()
    if under_way is not None:
        under_way.add([model], optimizers)


def leave_alone() -> None:
    """This process is a rank of `syncline train`, which records anyway."""
    global _off
    _off = True
    under_way = current()
    if under_way is not None and not under_way.begun:
        under_way.stop()


def _every() -> int | None:
    text = os.environ.get(EVERY, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"{EVERY}={text}: each n-th step is recorded, a number of 1 or more")
    return int(text)


def _begun() -> None:
    """A process of multiprocessing's ends without `atexit` where it was forked."""
    if multiprocessing.parent_process() is not None:
        Finalize(None, _at_child_exit, exitpriority=0)


def _at_child_exit() -> None:
    under_way, error = current(), sys.exc_info()[1]
    if under_way is not None:
        under_way.stop_quietly(None if isinstance(error, SystemExit) else error)


def _at_exit() -> None:
    under_way = current()
    if under_way is not None:
        # The error that ends the script was printed before this.
        under_way.stop_quietly(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
