"""Recording without a change to the script: `SYNCLINE_TRACE=path`, and optionally `SYNCLINE_TRACE_EVERY=n`.

An attached model is recorded from its first step on. A script that imports Syncline and trains otherwise is recorded
from its second step on: the first one shows that this process trains, which a data loader's worker does not.
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
_ignored = False


def start_if_requested() -> None:
    """Start a recording if the variable is set; called when `syncline` is imported and when a model is attached."""
    if _ignored or not os.environ.get(PATH) or current() is not None:
        return
    start(os.environ[PATH], every=_every()).on_start = _stop_at_child_exit
    atexit.register(_stop_at_exit)


def record_attached(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Record a model that was attached, if the variable is set."""
    if _ignored or not os.environ.get(PATH):
        return
    start_if_requested()
    running = current()
    if running is not None:
        running.add([model], optimizers)


def ignore_variables() -> None:
    """Ignore the variables in this process: the ranks of `syncline train` record anyway."""
    global _ignored
    _ignored = True
    running = current()
    if running is not None and not running.started:
        running.stop()


def _every() -> int | None:
    text = os.environ.get(EVERY, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"{EVERY}={text}: give the sampling interval as a number, 1 (all steps) or more")
    return int(text)


def _stop_at_child_exit() -> None:
    """Forked processes of `multiprocessing` exit without `atexit`, so they stop the recording in a finalizer."""
    if multiprocessing.parent_process() is None:
        return

    def stop() -> None:
        running, error = current(), sys.exc_info()[1]
        if running is not None:
            running.stop_quietly(None if isinstance(error, SystemExit) else error)

    Finalize(None, stop, exitpriority=0)


def _stop_at_exit() -> None:
    running = current()
    if running is not None:
        # The error that ends the script was printed before this.
        running.stop_quietly(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
