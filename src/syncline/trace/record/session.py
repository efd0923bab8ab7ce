"""The functions that start and stop a recording: `with recording(model, optimizer): ...`, or `start()` and `stop()`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.errors import UsageError
from syncline.trace.record.recording import Recording

FOLDER = "syncline-trace"
FILE = "trace.json.gz"

_latest: Recording | None = None

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
    if running is not None and running.started:
        raise UsageError("a recording is running: call syncline.trace.stop() first (SYNCLINE_TRACE starts one, too)")
    models, optimizers = _as_list(model, nn.Module, "model"), _as_list(optimizer, torch.optim.Optimizer, "optimizer")
    if running is not None:
        running.stop()
    _latest = started = Recording(_trace_file(path), every=every, timeout_s=timeout, parts=parts)
    if models or optimizers:
        started.add(models, optimizers)
    if optimizers and not models:
        started.find_models()
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
        started.stop_quietly(error)
        raise
    started.stop()


def _as_list(given: Any, kind: type, what: str) -> list[Any]:
    values = [] if given is None else [given] if isinstance(given, kind) else list(given)
    for value in values:
        if not isinstance(value, kind):
            raise UsageError(f"{what} is a {type(value).__name__}: give a torch {kind.__name__}, or several")
    return values


def _trace_file(path: str | Path | None) -> Path:
    asked = Path(path or FOLDER)
    return asked if asked.name.endswith((".json", ".json.gz")) else asked / FILE
