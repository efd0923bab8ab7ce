"""Runs one command inside a node and answers for all that it starts; its parent's end ends everything.

    python guard.py OWNER_PID NAMESPACE|- exit|stay CMD...

Started by its path and importing nothing of Syncline: it must cost milliseconds, once a process. SIGTERM (or
the owner's death) asks the command to end, with three seconds to do so; a second one, or the time, kills.
As the subreaper, the guard inherits whatever the command leaves behind, daemons too, so nothing escapes.
`exit` ends when the command ends; `stay` lets what a command left behind live on until the guard is ended.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

GRACE_SECONDS = 3.0
_LEFT_BEHIND_SECONDS = 0.5
_RETRY_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_libc = ctypes.CDLL(None, use_errno=True)


def main(owner: int, namespace: str, mode: str, command: list[str]) -> int:
    """Run `command`, wait until it and all its descendants are gone; returns its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != owner:  # it died before the first prctl
        return 128 + signal.SIGTERM
    if namespace != "-":
        _enter(namespace)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, guard)
    return _watch(child, stay=mode == "stay")


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything; the fields after it are state, parent, ...
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it ended while we looked
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for process in found:
        found.extend(children.get(process, []))
    return found[1:]


def _enter(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        sys.exit(f"cannot enter the namespace {namespace}: {os.strerror(ctypes.get_errno())}")
    os.close(descriptor)


def _become(command: list[str], guard: int) -> NoReturn:
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(128 + signal.SIGKILL)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        os.write(2, f"cannot run '{command[0]}': {error.strerror}\n".encode())
        os._exit(127)


def _watch(child: int, *, stay: bool) -> int:
    code: int | None = None
    deadline: float | None = None
    while True:
        wait = 3600.0 if deadline is None else max(0.0, deadline - time.monotonic())
        event = signal.sigtimedwait(_SIGNALS, wait)
        if event is None:
            if deadline is not None:
                _signal_all(signal.SIGKILL)
                deadline = time.monotonic() + _RETRY_SECONDS
        elif event.si_signo != signal.SIGCHLD:
            # The first asks, with time to end in order; the next one does not wait any longer.
            patience = GRACE_SECONDS if deadline is None else 0.0
            deadline = time.monotonic() + patience
            if code is None:
                os.killpg(child, signal.SIGTERM)
            else:
                _signal_all(signal.SIGTERM)
        ended, alone = _reap()
        if child in ended:
            code = os.waitstatus_to_exitcode(ended[child])
            code = code if code >= 0 else 128 - code
            if not alone and (not stay or deadline is not None):
                _signal_all(signal.SIGTERM)
                deadline = time.monotonic() + _LEFT_BEHIND_SECONDS
        if alone:
            return 0 if code is None else code


def _reap() -> tuple[dict[int, int], bool]:
    """The wait status of every child that ended, and whether no child is left."""
    ended: dict[int, int] = {}
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, True
        if process == 0:
            return ended, False
        ended[process] = status


def _signal_all(number: int) -> None:
    for process in descendants(os.getpid()):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
