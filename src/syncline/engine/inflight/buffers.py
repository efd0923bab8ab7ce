"""Broadcast of rank 0's buffers (BatchNorm statistics): on the CPU the first touch copies them, on CUDA a stream."""

import threading
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from syncline._compat.tensors import NoSubclasses
from syncline.engine.process_groups import flattened, spread
from syncline.engine.protocols import EngineView, Ticket


def broadcast_buffers(engine: EngineView, buffers: Sequence[Tensor]) -> Ticket:
    """Start to send rank 0's values to all ranks."""
    group = engine.groups.rounds[-1]
    # Through `data`, with a version of its own: a graph that has still to run may have saved them.
    plain = [b.data for b in buffers]
    if engine.device.type == "cpu":
        # At once, and not behind gradients: the first layers of the next forward need them.
        return BufferTicket(engine, plain, group)

    def work() -> None:
        begin = engine.recorder.mark("exchange")
        for flat, members in flattened(plain):
            dist.broadcast(flat, src=engine.groups.ranks[0], group=group)
            if engine.rank:
                spread(flat, members)
        engine.recorder.add("exchange", "broadcast", begin, engine.recorder.mark("exchange"), unit="buffers")

    return engine.executor.after(None, work)


class BufferTicket:
    """The ticket of buffers that are being sent with Gloo."""

    marked: list[Tensor] | None = None

    def __init__(self, engine: EngineView, buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._lock, self._done = threading.Lock(), False
        # Nobody may touch the buffers of a model that was dropped: its ticket must not keep the engine.
        self._engine = weakref.ref(engine)
        self._begin, self._step = engine.recorder.mark("exchange"), engine.recorder.step
        self._flat = flattened(buffers)
        source = engine.groups.ranks[0]
        self._works = [dist.broadcast(flat, src=source, group=group, async_op=True) for flat, _ in self._flat]

    def wait(self) -> None:
        """Wait for the values and copy them into the buffers. From any thread; takes the ticket's lock."""
        with self._lock:
            engine = self._engine()
            if self._done or engine is None:
                return
            recorder = engine.recorder
            begin = recorder.mark("wait")
            with engine.communicating("the broadcast of buffers"), NoSubclasses():
                for work in self._works:
                    work.wait()
                if engine.rank:
                    for flat, members in self._flat:
                        spread(flat, members)
            self._done = True
            end = recorder.mark("wait")
            recorder.add_blocked(begin, end)
            recorder.add("exchange", "broadcast", self._begin, end, unit="buffers", step=self._step)

    def done(self) -> bool:
        """Whether the values are in the buffers, or the engine was dropped."""
        return self._done or self._engine() is None
