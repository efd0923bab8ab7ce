"""Start and end processes of the forkserver with a time limit: a stopped forkserver (SIGSTOP) never answers.

A stopped forkserver is killed. That ends its processes, too, and Python starts a new forkserver for the next ones.
"""

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.threads import in_thread

START_S = 600.0
"""The longest start of a process; the first one loads torch."""
STOPPED_S = 5.0
"""The time after which a stopped forkserver is killed. Ctrl-Z and `fg` stop and continue it with this process."""
GRACE_S = 3.0
"""The time that a process has to end after each signal."""
_POLL_S = 0.1


class StartError(RuntimeError):
    """A process could not be started; the message says why."""


def start(process: Any) -> None:
    """Start a `Process` of the forkserver; `StartError` if the forkserver is stopped or does not answer."""
    started = in_thread(process.start, name="start-process")
    begun = running = time.monotonic()
    try:
        while not started.done():
            with suppress(TimeoutError):
                started.exception(timeout=_POLL_S)
            now = time.monotonic()
            running = running if _is_stopped() else now
            if now - running > STOPPED_S:
                raise StartError(f"the forkserver, process {_pid()}, is stopped; it was ended, run the command again")
            if now - begun > START_S:
                raise StartError(f"the forkserver does not answer for {START_S:.0f} s; it was ended")
        started.result()
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        raise UsageError(
            f"the folder for temporary files, {tempfile.gettempdir()}, has too long a path for a socket:"
            " set TMPDIR=/tmp"
        ) from None
    except StartError:
        _kill()
        raise
    finally:
        # After an interrupt the process may still come: then the caller can end it.
        with suppress(TimeoutError):
            started.exception(timeout=GRACE_S)


def end(processes: Sequence[Any]) -> None:
    """Terminate, then kill; returns when all have ended, or cannot be ended."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    _join(started)
    for process in started:
        if process.is_alive():
            process.kill()
    _join(started)
    if _is_stopped():  # it does not say that its processes have ended
        _kill()
        _join(started)
    for process in started:
        if not process.is_alive():
            process.close()


def _join(processes: Sequence[Any]) -> None:
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _is_stopped() -> bool:
    pid = _pid()
    return pid is not None and _state(pid) in ("T", "t")


def _kill() -> None:
    pid = _pid()
    if pid is None:
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_S
    while _state(pid) not in ("Z", "X", "") and time.monotonic() < deadline:
        time.sleep(_POLL_S / 10)


def _pid() -> int | None:
    """The forkserver that this process has started; None if it has none, or uses that of its parent."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
    return None


def _state(pid: int) -> str:
    """The letter of a process's state as the kernel gives it; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
