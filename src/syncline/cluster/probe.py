"""What a cluster could use on this machine, tried for real. A program: `capabilities` runs it as a child."""

import json
import sys
from typing import Any

from syncline.cluster import _linux, network
from syncline.cluster.privileges import ensure_privileges
from syncline.errors import UsageError


def probe() -> dict[str, Any]:
    """Try namespaces, then each kind of shaping; changes the calling process, so only a child may call it."""
    how = "root" if _linux.is_privileged() else "userns"
    try:
        ensure_privileges()
        nothing = _why_not(network.Link())
    except UsageError as error:
        nothing = str(error)
    if nothing:
        return {"how": "none", "can_shape": False, "netem": False, "why": nothing}
    tbf = _why_not(network.Link(bandwidth=10**9))
    netem = tbf or _why_not(network.Link(latency=0.001))
    return {"how": how, "can_shape": not tbf, "netem": not netem, "why": netem}


def _why_not(link: network.Link) -> str:
    # The descriptors are left to the end of this process.
    try:
        network.build(1, link=link, keep=[])
    except UsageError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    json.dump(probe(), sys.stdout)
