"""Whether a trace can tell waits for a late rank from transfers: all ranks must be there, on one clock."""

from collections.abc import Mapping
from typing import Any


def waits_missing(metadata: Mapping[str, Any], ranks: int) -> str | None:
    """Why not, in words; None where it can. `ranks` is how many the trace has."""
    if metadata.get("aligned", True) is False or metadata.get("clock_error_ns", 0) is None:
        return "not all ranks' clocks could be compared"
    world = metadata.get("world_size")
    if type(world) is int and world > ranks:
        return f"of {world} ranks the trace has {ranks}"
    return None
