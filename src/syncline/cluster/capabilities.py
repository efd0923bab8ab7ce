"""Capabilities of this machine for emulated nodes: namespaces, traffic shaping, latency and loss.

`capabilities` runs this module as a program in a child process, which tries everything and then ends.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

from syncline.cluster import namespaces, network
from syncline.cluster.privileges import ensure_privileges
from syncline.errors import UsageError


@dataclass(frozen=True)
class Capabilities:
    """`how` is `root`, `userns` (an ordinary user, through a user namespace) or `none`.

    `why` is a sentence about the first thing that is missing, with the fix; empty if nothing is missing.
    """

    can_namespaces: bool
    how: str
    can_shape: bool
    netem: bool
    why: str


def capabilities() -> Capabilities:
    """Try everything in a child process, so that nothing of the trial remains; takes about 0.3 s."""
    # One thread only: a process with more cannot enter a user namespace.
    single = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "syncline.cluster.capabilities"], env=single, capture_output=True, text=True, check=False
    )
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return _none(f"nodes cannot be emulated: {reason}")
    return Capabilities(**json.loads(child.stdout))


def _probe() -> Capabilities:
    """Try namespaces, then each kind of shaping; changes the calling process, so only a child may call it."""
    how = "root" if namespaces.is_privileged() else "userns"
    try:
        ensure_privileges()
        missing = _why_not(network.LinkShape())
    except UsageError as error:
        missing = str(error)
    if missing:
        return _none(missing)
    tbf = _why_not(network.LinkShape(bandwidth=10**9))
    netem = tbf or _why_not(network.LinkShape(latency=0.001))
    return Capabilities(can_namespaces=True, how=how, can_shape=not tbf, netem=not netem, why=netem)


def _none(why: str) -> Capabilities:
    return Capabilities(can_namespaces=False, how="none", can_shape=False, netem=False, why=why)


def _why_not(link: network.LinkShape) -> str:
    # The descriptors are closed when this process ends.
    try:
        network.build(1, link=link, keep=[])
    except UsageError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    json.dump(asdict(_probe()), sys.stdout)
