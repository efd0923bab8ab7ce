"""What this machine lets a cluster do, for `doctor` and for those who choose between nodes and local ranks."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Capabilities:
    """`how` is `root`, `userns` (an ordinary user, through a user namespace) or `none`.

    `why` is the sentence for the first thing that is missing, with the way out; empty when nothing is.
    """

    can_namespaces: bool
    how: str
    can_shape: bool
    netem: bool
    why: str


def capabilities() -> Capabilities:
    """Try everything in a child process, which takes all of it with it; about 0.3 s."""
    # One thread only: a process with more cannot enter a user namespace.
    single = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "syncline.cluster.probe"], env=single, capture_output=True, text=True, check=False
    )
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        found: dict[str, Any] = {
            "how": "none",
            "can_shape": False,
            "netem": False,
            "why": f"nodes cannot be emulated: {reason}",
        }
    else:
        found = json.loads(child.stdout)
    return Capabilities(can_namespaces=found["how"] != "none", **found)
