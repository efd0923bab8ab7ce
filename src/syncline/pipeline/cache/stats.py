"""Counts and times of an activation cache, and the decision whether it pays."""

from collections import deque
from dataclasses import dataclass, field

from syncline.stats import median

_TIMES = 15
_ENOUGH = 3


@dataclass
class CacheStats:
    """Samples by where their activations came from, checks, and bytes in use."""

    hits: int = 0
    """Read from the cache."""
    continued: int = 0
    """Read at the previous boundary and computed from there."""
    misses: int = 0
    """Computed from the inputs."""
    stored: int = 0
    prefetched: int = 0
    """Hits that were read in the background before they were asked for."""
    damaged: int = 0
    """Entries whose checksum was wrong: computed again."""
    checked: int = 0
    """Hits that were computed again and compared."""
    rounded: int = 0
    """Of these, not bit-equal but equal to rounding: kernels can differ with the batch size."""
    wrong: int = 0
    """Of these, different: the computed values were used."""
    gpu_bytes: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0


@dataclass
class Payoff:
    """Seconds per sample to compute the activations at one boundary, to read them, and to store them."""

    compute: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))
    read: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))
    store: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))

    def known(self) -> bool:
        """Whether there are enough measurements for a decision."""
        return min(len(self.compute), len(self.read)) >= _ENOUGH

    def why_not(self, *, epochs_left: float) -> str:
        """Why the cache does not pay, as the end of a sentence; empty where it does."""
        compute, read = median(list(self.compute)), median(list(self.read))
        if read >= compute:
            return f"reading a sample takes {read * 1e3:.3g} ms and computing it {compute * 1e3:.3g} ms"
        store = median(list(self.store)) if self.store else 0.0
        if store > (compute - read) * epochs_left:
            return (
                f"storing a sample takes {store * 1e3:.3g} ms, and reading it {epochs_left:.3g} more times saves"
                f" {(compute - read) * epochs_left * 1e3:.3g} ms"
            )
        return ""
