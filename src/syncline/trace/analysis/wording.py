"""Phases, sizes and rates as sentences say them."""


def words(phase: str) -> str:
    """A phase in a sentence."""
    names = {"exposed_encode": "encoding", "exposed_exchange": "its transfers", "data": "data loading"}
    names |= {"wait": "waits"}
    names |= {"other": "work outside the recorded lanes", "replan": "planning", "probe": "measuring"}
    return names.get(phase, phase)


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def bits(rate: float) -> str:
    """Bits a second with a unit."""
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if rate < 1000:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.3g} Gbit/s"
