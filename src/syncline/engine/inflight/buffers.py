"""Rank 0's buffers on their way: over Gloo at once, put in place by whoever touches one first; else on a stream."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from syncline._compat import NoSubclasses
from syncline.engine.inflight import tickets as pending
from syncline.engine.process_groups import flattened, spread

if TYPE_CHECKING:
    from syncline.engine.sync import Sync


def send(sync: "Sync", buffers: Sequence[Tensor]) -> Any:
    """Send rank 0's values to all; a touch of a buffer waits for them, as does what is returned."""
    group = sync.groups.rounds[-1]
    # Through `data`, with a version of its own: a graph that is still to run may have saved them.
    plain = [b.data for b in buffers]

    def work() -> None:
        begin = sync.recorder.mark("exchange")
        for flat, members in flattened(plain):
            dist.broadcast(flat, src=sync.groups.ranks[0], group=group)
            if sync.rank:
                spread(flat, members)
        sync.recorder.add("exchange", "broadcast", begin, sync.recorder.mark("exchange"), unit="buffers")

    # Over Gloo at once, and not behind gradients: the first layers of the next forward need them.
    sent: Any = Arriving(sync, plain, group) if sync.device.type == "cpu" else sync.executor.after(None, work)
    marked = [pending.mark(b, sent) for b in buffers]
    if not all(marked):
        sent.wait()
    return sent


class Arriving:
    """The ticket of buffers that are being sent over Gloo."""

    marked: list[Tensor] | None = None

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
            recorder.add_blocked(begin, end)
            recorder.add("exchange", "broadcast", self._begin, end, unit="buffers", step=self._step)

    def done(self) -> bool:
        """Whether they are in place."""
        return self._done
