"""Privileges for network namespaces: as root, or as root of a new user namespace."""

import os
import subprocess
import sys
from pathlib import Path

from syncline.cluster import namespaces
from syncline.errors import UsageError

_PROGRAM = Path(namespaces.__file__)
_MARK = "SYNCLINE_USER_NAMESPACE"


def why_impossible() -> str:
    """Why this machine allows no network namespaces, or an empty string; tried in a child process."""
    if sys.platform != "linux":
        return "emulated nodes need Linux"
    check = subprocess.run(  # noqa: S603 - our own file
        [sys.executable, "-I", "-S", str(_PROGRAM), "--check"], capture_output=True, text=True, check=False
    )
    if check.returncode == 0:
        return ""
    reason = (check.stderr.strip().splitlines() or [f"exit code {check.returncode}"])[-1]
    return f"neither root nor a user namespace is available here ({reason})"


def ensure_privileges(*, reexec: bool = False) -> None:
    """Give this process the right to create nodes; does nothing if the process already has it.

    An ordinary user's process becomes root of its own user namespace, in place if it has one thread. With more threads
    (torch starts some) the kernel refuses; `reexec=True` then starts the same command line again inside the namespace.
    Only a command-line tool may use `reexec`, before it has done anything else.
    """
    if sys.platform == "linux" and namespaces.is_privileged():
        return
    # Tried in a child first: if a policy forbids the second half, this process must not be left halfway.
    reason = why_impossible()
    if reason:
        raise UsageError(f"{reason}: run as root, or allow unprivileged user namespaces")
    if namespaces.thread_count() == 1:
        namespaces.become_namespace_root()
        return
    if not reexec or _MARK in os.environ:
        raise UsageError(
            "this process has threads already, so it cannot enter a user namespace: "
            "call ensure_privileges() before torch is imported, or run as root"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[_MARK] = "1"
    again = [sys.executable, *sys.orig_argv[1:]]
    os.execv(sys.executable, [sys.executable, "-I", "-S", str(_PROGRAM), *again])  # noqa: S606
