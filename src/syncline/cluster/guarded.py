"""Starts a process that cannot outlive its owner, nor leave anything behind (see `guard.py`)."""

import os
import subprocess
import sys
from collections.abc import Mapping

from syncline.cluster import guard


def start_guarded(
    command: list[str],
    *,
    environment: Mapping[str, str],
    namespace: str = "-",
    output: int | None = None,
    stay: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start `command` under a guard, in a session of its own, without standard input.

    `environment` adds to this process's. `terminate()` ends the command and all its descendants, with time to
    end in order; do not `kill()` it. The thread that calls this must live on until the process ended: the
    kernel takes that thread's end for the owner's. With `stay`, a daemon that the command leaves lives on.
    """
    mode = "stay" if stay else "exit"
    return subprocess.Popen(  # noqa: S603 - the user's own command
        [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), namespace, mode, *command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
