"""The functions that start and stop a recording: `with recording(model, optimizer): ...`, or `start()` and `stop()`.

`SYNCLINE_TRACE=path`, and optionally `SYNCLINE_TRACE_EVERY=n`, record a script that imports Syncline, and
`python -m syncline.trace run` any script. An attached model is then recorded from its first step on, another loop from
its second step on: the first one shows that this process trains, which a data loader's worker does not.
`SYNCLINE_WATCH=1` names the straggler in the log meanwhile; alone, it records without writing a trace.
"""

import atexit
import errno
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import UsageError
from syncline.files import check_target, reason
from syncline.trace.record.recording import Recording
from syncline.trace.record.straggler_watch import watch_requested

FOLDER = "syncline-trace"
FILE = "trace.json.gz"
PATH, EVERY = "SYNCLINE_TRACE", "SYNCLINE_TRACE_EVERY"

_log = logging.getLogger("syncline")
_latest: Recording | None = None
_ignored = False

Models = nn.Module | Sequence[nn.Module] | None
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def start(
    path: str | Path | None = None,
    *,
    model: Models = None,
    optimizer: Optimizers = None,
    every: int | None = None,
    timeout: float = 30.0,
    parts: bool = False,
) -> Recording:
    """Record this process's training until `stop()`. Every rank calls it.

    path: the trace file, or a folder for it; `syncline-trace` by default.
    model: the model or models that the loop calls; by default they are found in the first recorded step.
    optimizer: one or several; a step ends with the last one's step. By default the first optimizer that steps.
    every: record every n-th step; 1 records all. By default all of the first steps, and then as few as keep the cost of
        recording well below 1% of the time.
    timeout: how many seconds `stop` waits for the other ranks.
    parts: each rank writes a file of its own as well.
    """
    global _latest
    if every is not None and every < 1:
        raise UsageError(f"every is {every}: it must be 1 (all steps) or more")
    running = current()
    if running is not None and not running.automatic:
        raise UsageError("a recording is running: call syncline.trace.stop() first")
    models, optimizers = _as_list(model, nn.Module, "model"), _as_list(optimizer, torch.optim.Optimizer, "optimizer")
    if running is not None:
        if running.started and running.path is not None:
            _log.warning(
                "syncline: %s: the recording of %s ends, because the script starts its own", running.path, PATH
            )
        running.stop()
    file = _trace_file(path)
    _warn_if_not_writable(file)
    _latest = started = Recording(file, every=every, timeout_s=timeout, parts=parts)
    if models or optimizers:
        started.add(models, optimizers)
    return started


def stop() -> Path | None:
    """Stop the recording. Returns the trace's path on rank 0, and of this rank's own file where one was needed."""
    running = current()
    return None if running is None else running.stop()


def current() -> Recording | None:
    """The recording that is running."""
    return None if _latest is None or _latest.stopped else _latest


@contextmanager
def recording(
    model: Models = None,
    optimizer: Optimizers = None,
    *,
    path: str | Path | None = None,
    every: int | None = None,
    timeout: float = 30.0,
    parts: bool = False,
) -> Iterator[Recording]:
    """Record a block, with the arguments of `start`. After an error in it the trace says so and is still written."""
    started = start(path, model=model, optimizer=optimizer, every=every, timeout=timeout, parts=parts)
    try:
        yield started
    except BaseException as error:
        left = isinstance(error, SystemExit) and not error.code
        started.stop(None if left else error)
        raise
    started.stop()


def start_if_requested() -> None:
    """Start a recording if a variable asks for it; called when `syncline` is imported and when a model is attached."""
    global _latest
    if _ignored or not _requested() or current() is not None:
        return
    if os.environ.get(PATH):
        started = start(os.environ[PATH], every=_every())
    else:
        _latest = started = Recording(None, every=_every(), timeout_s=0.0, parts=False)
    started.automatic, started.on_start = True, _stop_at_child_exit
    atexit.register(_stop_at_exit)


def record_attached(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Record a model that was attached, if a variable asks for it."""
    if _ignored or not _requested():
        return
    start_if_requested()
    if running := current():
        running.add([model], optimizers)


def ignore_variables() -> None:
    """Ignore the variables in this process: the ranks of `syncline train` record anyway."""
    global _ignored
    _ignored = True
    running = current()
    if running is not None and not running.started:
        running.stop()


def _requested() -> bool:
    return bool(os.environ.get(PATH)) or watch_requested()


def _as_list(given: Any, kind: type, what: str) -> list[Any]:
    values = [] if given is None else [given] if isinstance(given, kind) else list(given)
    for value in values:
        if not isinstance(value, kind):
            raise UsageError(f"{what} is a {type(value).__name__}: give a torch {kind.__name__}, or several")
    return values


def _trace_file(path: str | Path | None) -> Path:
    asked = Path(path or FOLDER)
    return asked if asked.name.endswith((".json", ".json.gz")) else asked / FILE


def _every() -> int | None:
    text = os.environ.get(EVERY, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        _log.warning("syncline: %s=%s is ignored: give the sampling interval as a number, 1 or more", EVERY, text)
        return None
    return int(text)


def _warn_if_not_writable(file: Path) -> None:
    """Notice a path where rank 0 cannot write before hours of training, without creating anything there."""
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")
    if str(rank) != "0":
        return
    folder = next(above for above in file.absolute().parents if above.exists())
    try:
        check_target(file)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _log.warning(
            "syncline: the trace cannot be written to %s (%s): name another path, or it goes to a temporary folder",
            file, reason(error),
        )  # fmt: skip


def _stop_at_child_exit() -> None:
    """Forked processes of `multiprocessing` exit without `atexit`, so they stop the recording in a finalizer."""
    if multiprocessing.parent_process() is None:
        return

    def stop_child() -> None:
        error = sys.exc_info()[1]
        if running := current():
            running.stop(None if isinstance(error, SystemExit) else error)

    Finalize(None, stop_child, exitpriority=0)


def _stop_at_exit() -> None:
    if running := current():
        # The error that ends the script was printed before this.
        running.stop(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
