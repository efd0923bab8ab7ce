"""The right to make network namespaces: root's own, or root's in a user namespace of one's own."""

import os
import subprocess
import sys
from pathlib import Path

from syncline.cluster import _linux
from syncline.errors import UsageError

_PROGRAM = Path(_linux.__file__)
_MARK = "SYNCLINE_USER_NAMESPACE"


def why_impossible() -> str:
    """Why this machine gives no network namespaces, or an empty string; tried in a child, nothing stays."""
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
    """Give this process the right to make nodes; without any effect where it has it.

    An ordinary user's process becomes root of its own user namespace: in place while it has one thread.
    With more threads (torch starts some) the kernel refuses that, and `reexec=True` starts the same command
    line again inside the namespace instead; only a command line tool at its very start may ask for that.
    """
    if sys.platform == "linux" and _linux.is_privileged():
        return
    # Tried in a child first: where a policy forbids the second half, this process must not be left halfway.
    reason = why_impossible()
    if reason:
        raise UsageError(f"{reason}: run as root, or allow unprivileged user namespaces")
    if _linux.thread_count() == 1:
        _linux.become_namespace_root()
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
