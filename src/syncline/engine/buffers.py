"""Rank 0's buffers on their way over Gloo: sent at once, and put in place by whoever touches one first."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from syncline._compat import NoSubclasses
from syncline.engine.groups import flattened, spread

if TYPE_CHECKING:
    from syncline.engine.sync import Sync


class Arriving:
    """The ticket of buffers that are being sent."""

    def __init__(self, sync: "Sync", buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._sync, self._lock, self._done = sync, threading.Lock(), False
        self._begin, self._step = sync.recorder.mark("exchange"), sync.recorder.step
        self._flat = flattened(buffers)
        source = sync.groups.ranks[0]
        self._works = [dist.broadcast(flat, src=source, group=group, async_op=True) for flat, _ in self._flat]

    def wait(self) -> None:
        """Put the buffers in place."""
        with self._lock:
            if self._done:
                return
            recorder, sync = self._sync.recorder, self._sync
            begin = recorder.mark("wait")
            with sync._watched.communicating("the broadcast of buffers"), NoSubclasses():
                for work in self._works:
                    work.wait()
                if sync.rank:
                    for flat, members in self._flat:
                        spread(flat, members)
            self._done = True
            end = recorder.mark("wait")
            recorder.blocked(begin, end)
            recorder.add("exchange", "broadcast", self._begin, end, unit="buffers", step=self._step)

    def settled(self) -> bool:
        """Whether they are in place."""
        return self._done
