"""Read the cache entries of coming batches in a background thread; a batch can be taken whole or in micro-batches."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from syncline.pipeline.cache.store import Found

_AHEAD = 2
"""Batches that are read in advance at most."""


@dataclass
class _Announced:
    """A batch that is being read: the row of each sample, and how many samples were not taken yet."""

    key: tuple[int, int]
    rows: dict[int, int]
    found: Future[Found]
    size: int
    left: int


class Prefetcher:
    """Batches are read in the order in which they are announced. Used by one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "syncline-cache")
        self._batches: list[_Announced] = []

    def announce(self, key: tuple[int, int], samples: Tensor, read: Callable[[], Found]) -> None:
        """Start to read a batch. `key` is (level, view). Two batches are held; the older one gives way to a third."""
        rows = {sample: row for row, sample in enumerate(samples.tolist())}
        batch = _Announced(key, rows, self._thread.submit(read), size=len(samples), left=len(samples))
        self._batches = [*self._batches[-(_AHEAD - 1) :], batch]

    def take(self, key: tuple[int, int], samples: Tensor) -> Found | None:
        """The entries of samples that were announced, or None; batches announced before theirs are dropped."""
        wanted = samples.tolist()
        for number, batch in enumerate(self._batches):
            if batch.key == key and all(sample in batch.rows for sample in wanted):
                found = batch.found.result().select([batch.rows[sample] for sample in wanted], of=batch.size)
                batch.left -= len(wanted)
                self._batches = self._batches[number + (batch.left <= 0) :]
                return found
        return None

    def clear(self) -> None:
        """Forget all batches."""
        self._batches.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._batches.clear()
