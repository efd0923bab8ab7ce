"""Run ranks as processes on this machine, watch them, and end them all when one fails.

A forkserver with torch already loaded starts each rank in milliseconds. A rank may run in the network namespace of an
emulated node. No rank outlives the caller.
"""

import ctypes
import multiprocessing as mp
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from syncline import trust
from syncline.cluster import forkserver, memory
from syncline.cluster.nodes import enter
from syncline.errors import RankFailure, UsageError
from syncline.files import open_log, open_regular, reason

PRELOAD = ("torch", "torch._dynamo", "syncline.train.rank.worker")
_PR_SET_PDEATHSIG = 1
_MORE_FAILURES_S = 1.0
_PEER_LOST = re.compile(r"gloo|nccl|connection (closed|reset) by peer|DistBackendError|DistNetworkError", re.I)

Report = Callable[[Any], None]
"""Sends a plain value from a rank to the caller of `run_ranks`."""


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    rank: int
    world_size: int
    local_rank: int = 0
    node: int = 0
    netns: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Failure:
    rank: int
    time: int
    summary: str
    traceback: str
    signal: bool

    @property
    def order(self) -> tuple[int, int]:
        """Causes first, the earliest first; a rank that lost its peer is only a consequence."""
        return (0 if self.signal else int(is_peer_loss(self.summary)), self.time)


def is_peer_loss(summary: str) -> bool:
    """Whether an error message looks like the consequence of another rank's end."""
    return _PEER_LOST.search(summary) is not None


def warm_up() -> None:
    """Start the forkserver and load torch there, so that the first run does not pay for it."""
    # If it fails, so does the first run, which says why.
    with suppress(RankFailure), tempfile.TemporaryDirectory(prefix="syncline-") as folder:
        run_ranks(_do_nothing, [Place(rank=0, world_size=1)], None, logs=Path(folder))


def _do_nothing(place: Place, payload: Any, report: Report) -> None:
    """The function of a rank with nothing to do."""


def run_ranks(
    function: Callable[[Place, Any, Report], Any],
    places: Sequence[Place],
    payload: Any,
    *,
    logs: Path,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Run `function(place, payload, report)` for every place; returns the results in rank order.

    The output of rank r goes to `logs/rank{r}.log`. When a rank fails, the others are ended within seconds and
    `RankFailure` names the rank that failed first, with its traceback. A `UsageError` of a rank is raised unchanged.
    """
    kills = memory.oom_kills()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    pairs = [context.Pipe(duplex=False) for _ in places]
    # A child of multiprocessing has the folder of its parent, who may need it still.
    temporary = get_temp_dir() if mp.parent_process() is None else None
    caller = (os.getpid(), temporary, trust.current())
    ranks = [
        context.Process(
            target=_main, args=(function, place, payload, sender, str(logs / f"rank{place.rank}.log"), *caller)
        )
        for place, (_, sender) in zip(places, pairs, strict=True)
    ]
    try:
        for place, process, (_, sender) in zip(places, ranks, pairs, strict=True):
            try:
                forkserver.start(process)
            except forkserver.StartError as error:
                summary = f"cannot be started: {error}"
                raise RankFailure(f"rank {place.rank} {summary}", rank=place.rank, summary=summary) from None
            sender.close()
        return _watch(ranks, [receiver for receiver, _ in pairs], places, logs, on_message, kills)
    finally:
        forkserver.end(ranks)
        for receiver, sender in pairs:
            receiver.close()
            sender.close()


def _watch(
    ranks: Sequence[Any],
    receivers: Sequence[Connection],
    places: Sequence[Place],
    logs: Path,
    on_message: Callable[[int, Any], None] | None,
    kills: int,
) -> list[Any]:
    """Wait for all ranks, or for the first failure; `kills` were the out-of-memory kills before they started."""
    values: dict[int, Any] = {}
    failures: list[_Failure] = []
    open_pipes = dict(enumerate(receivers))
    deadline: float | None = None
    while open_pipes and (deadline is None or time.monotonic() < deadline):
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        for ready in wait(list(open_pipes.values()), timeout=timeout):
            index = next(i for i, pipe in open_pipes.items() if pipe is ready)
            rank = places[index].rank
            try:
                kind, *content = open_pipes[index].recv()
            except (EOFError, OSError):
                del open_pipes[index]
                if index not in values and all(failure.rank != rank for failure in failures):
                    failures.append(_silent_end(ranks[index], rank, logs, kills))
                continue
            if kind == "message" and on_message is not None:
                on_message(rank, content[0])
            elif kind == "value":
                values[index] = content[0]
            elif kind == "usage":
                raise content[0](content[1])
            elif kind == "error":
                at, summary, trace = content
                failures.append(_Failure(rank, at, summary, trace, signal=False))
        if failures and deadline is None:
            deadline = time.monotonic() + _MORE_FAILURES_S
    if failures:
        cause = min(failures, key=lambda failure: failure.order)
        message = f"rank {cause.rank} failed: {cause.summary}"
        raise RankFailure(message, rank=cause.rank, summary=cause.summary, traceback=cause.traceback)
    return [values[i] for i in range(len(places))]


def _silent_end(process: Any, rank: int, logs: Path, kills: int) -> _Failure:
    """The failure of a rank that closed its pipe without a result: killed by a signal, or ended early."""
    now = time.monotonic_ns()
    process.join(forkserver.GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        summary = f"ended by {signal.Signals(-code).name}{_lack_of_memory(-code, kills)}"
    else:
        summary = f"left with exit code {'unknown' if code is None else code} before it had finished"
    tail = _tail(logs / f"rank{rank}.log")
    cause = next((line.strip() for line in reversed(tail) if "what():" in line or "Error" in line), "")
    return _Failure(rank, now, f"{summary}: {cause}" if cause else summary, "\n".join(tail), signal=True)


def _lack_of_memory(number: int, kills: int) -> str:
    """A remark if the signal came from an out-of-memory killer: the kernel counts its own kills."""
    if number != signal.SIGKILL:
        return ""
    if memory.oom_kills() > kills:
        return ", out of memory: use a smaller batch, fewer ranks or a smaller model"
    return ", probably out of memory: this machine has too little for its processes" if memory.is_short() else ""


def _tail(path: Path, lines: int = 30) -> list[str]:
    try:
        with open_regular(path) as file:
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _main(
    function: Callable[..., Any],
    place: Place,
    payload: Any,
    sender: Connection,
    log: str,
    caller: int,
    temporary: str | None,
    trusted: trust.Trust,
) -> None:
    """Main function of a rank process. Only the parent reacts to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    trust.use(trusted)
    try:
        _redirect(log)
        os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
        os.environ.update(place.environment)
        if place.netns is not None:
            enter(place.netns)
        # Only now: a thread started earlier would stay in the old namespace.
        threading.Thread(target=_end_with, args=(caller, temporary), daemon=True).start()
        value = function(place, payload, lambda message: sender.send(("message", message)))
        sender.send(("value", value))
    except UsageError as error:
        sender.send(("usage", type(error), str(error)))
    except BaseException as error:
        summary = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        sender.send(("error", time.monotonic_ns(), summary, traceback.format_exc()))
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
            sys.stderr.flush()
        sender.close()
        os._exit(1)
    sender.close()


def _end_with(caller: int, temporary: str | None) -> None:
    """End this rank when the caller ends. Its parent, the forkserver, lives as long as any rank does.

    A caller that was killed could not remove its folder for the forkserver's socket, `temporary`.
    """
    try:
        descriptor = os.pidfd_open(caller)
    except ProcessLookupError:
        os._exit(1)
    select.select([descriptor], [], [])
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    os._exit(1)


def _redirect(log: str) -> None:
    try:
        descriptor = open_log(log, append=True)
    except OSError as error:
        raise UsageError(f"cannot write {log}: {reason(error)}; remove it, or use another folder") from None
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
