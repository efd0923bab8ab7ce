"""Guard process: runs one command, and ends it with all its descendants when the owner process ends.

    python guard.py OWNER_PID NAMESPACE|- exit|stay CMD...

`start_guarded` starts this file by its path. It imports nothing from Syncline and little else, because every guarded
process pays for its start. SIGTERM (or the death of the owner) asks the command to end within three seconds; a second
SIGTERM, or the end of that time, kills it. The guard is a subreaper: it inherits every process that the command leaves
behind, daemons included. With `exit` the guard ends those when the command ends; with `stay` they live until the guard
is ended.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import subprocess

GRACE_SECONDS = 3.0
_LEFT_BEHIND_SECONDS = 0.5
_RETRY_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_libc = ctypes.CDLL(None, use_errno=True)


def start_guarded(
    command: list[str],
    *,
    environment: Mapping[str, str],
    namespace: str = "-",
    output: int | None = None,
    stay: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start `command` under a guard, in its own session and without standard input.

    `environment` is added to this process's environment. `terminate()` ends the command and all its descendants and
    gives them time to shut down; do not call `kill()`. The calling thread must live until the process has ended: the
    kernel reports the end of that thread as the death of the owner. With `stay`, a daemon that the command leaves
    behind lives on.
    """
    import subprocess  # here, because the guard itself does without it and starts faster

    mode = "stay" if stay else "exit"
    return subprocess.Popen(  # noqa: S603 - the user's own command
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), namespace, mode, *command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def main(owner: int, namespace: str, mode: str, command: list[str]) -> int:
    """Run `command`, wait until it and all its descendants have ended, and return its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != owner:  # the owner died before the first prctl
        return 128 + signal.SIGTERM
    if namespace != "-":
        _enter(namespace)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _exec_command(command, guard)
    return _watch(child, stay=mode == "stay")


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The process name in parentheses may contain anything; after it come the fields state, parent, ...
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # the process has ended
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


def _exec_command(command: list[str], guard: int) -> NoReturn:
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(128 + signal.SIGKILL)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell needed
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
            # The first signal gives time to shut down; the next one does not.
            patience = GRACE_SECONDS if deadline is None else 0.0
            deadline = time.monotonic() + patience
            if code is None:
                try:
                    os.killpg(child, signal.SIGTERM)
                except ProcessLookupError:  # it has not begun its own session yet
                    os.kill(child, signal.SIGTERM)
            else:
                _signal_all(signal.SIGTERM)
        ended, none_left = _reap()
        if child in ended:
            code = os.waitstatus_to_exitcode(ended[child])
            code = code if code >= 0 else 128 - code
            if not none_left and (not stay or deadline is not None):
                _signal_all(signal.SIGTERM)
                deadline = time.monotonic() + _LEFT_BEHIND_SECONDS
        if none_left:
            return 0 if code is None else code


def _reap() -> tuple[dict[int, int], bool]:
    """The wait status of every child that has ended, and whether no child is left."""
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
