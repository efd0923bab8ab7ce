"""All ranks record the same steps, or their waits could not be told: rank 0 decides which, the store tells the others.

The loop does not wait for it. A rank that learns of it late has recorded more than the others until then, no less.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist

from syncline._compat import PrefixStore, Store, default_store
from syncline.trace.record.gather import prefix
from syncline.trace.record.sampling import Sampling

_KEY = "sampling"
_SOON_S, _LATE_S, _END_S = 0.02, 1.0, 1.0


def agree(mine: Sampling, use: Callable[[Sampling], None], *, number: int) -> "Agreement | None":
    """`use` what this process has decided where it is alone or rank 0, and what rank 0 has where it is another.

    `number` counts a process's recordings.
    """
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    first = not together or dist.get_rank() == 0
    if first:
        use(mine)
    return Agreement(PrefixStore(prefix(number), default_store()), mine if first else None, use) if together else None


class Agreement:
    """A short-lived thread beside the loop: a store may take its time to answer."""

    def __init__(self, store: Store, mine: Sampling | None, use: Callable[[Sampling], None]) -> None:
        """Tell the others `mine`; where it is None, look for what rank 0 tells and `use` it."""
        self._ended = threading.Event()
        call = (lambda: self._listen(store, use)) if mine is None else (lambda: self._tell(store, mine))
        self._thread = threading.Thread(target=self._quietly, args=(call,), name="syncline-sampling", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the store alone."""
        self._ended.set()
        self._thread.join(_END_S)

    def _listen(self, store: Store, use: Callable[[Sampling], None]) -> None:
        wait = _SOON_S
        # Not by the store's own wait: it keeps other threads from the store.
        while not self._ended.is_set():
            if store.check([_KEY]):
                use(Sampling(**json.loads(store.get(_KEY))))
                return
            self._ended.wait(wait)
            wait = min(1.5 * wait, _LATE_S)

    @staticmethod
    def _tell(store: Store, mine: Sampling) -> None:
        store.set(_KEY, json.dumps(asdict(mine)))

    @staticmethod
    def _quietly(call: Callable[[], None]) -> None:
        try:
            call()
        except (RuntimeError, ValueError, OSError):
            return  # a store that is gone: this rank goes on as it did, and the recording's end says so
