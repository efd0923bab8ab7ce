"""Run an exchange over a process group: launch requests and wait for their answers.

After its first communication, a launch only sends point to point, tagged with the launch's number. So on Gloo, open
launches may advance in any order, each on its own thread. On NCCL nothing blocks the host: `wait` enqueues the rest on
the current stream, and all ranks must advance launches in the same order.
"""

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.codecs import Gather, Request
from syncline.exchange.build import Exchange, build, op_bytes
from syncline.exchange.moves import AllGather, AllReduce, Op, Position

# torch 2.13 calls it all_gather_single and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ROUNDS = 1 << 12
_LAUNCHES = 1 << 16


# Launches are numbered per group, so that messages of several links on one group never mix.
_numbers: "weakref.WeakKeyDictionary[Any, Iterator[int]]" = weakref.WeakKeyDictionary()


class Link:
    """An exchange on a process group. All ranks make the launches of the group, over all its links, in one order."""

    def __init__(self, exchange: str | Exchange, process_group: dist.ProcessGroup | None = None) -> None:
        self.exchange = build(exchange)
        self.group = process_group
        world = dist.get_world_size(process_group)
        self.position = Position(dist.get_rank(process_group), world, self.exchange.workers(world))
        if dist.get_backend(process_group) != "gloo" and torch.cuda.is_available():
            # NCCL needs all ranks in a group's first communication, but a move may be between two ranks only.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=process_group)
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._numbers = _numbers.setdefault(process_group or dist.group.WORLD, itertools.count())

    def launch(self, request: Request) -> "Handle":
        """Start a request; its first communication is issued before this returns."""
        return Handle(self, request, next(self._numbers) % _LAUNCHES * _ROUNDS)

    def ask(self, request: Request) -> Any:
        """Launch a request and wait for its answer."""
        return self.launch(request).wait()

    def count(self, sent: int) -> None:
        """Add to the bytes sent. Safe from any thread."""
        with self._lock:
            self.sent_bytes += sent


class Handle:
    """One launched request. `wait` runs it to the end. Use it from one thread only."""

    def __init__(self, link: Link, request: Request, base: int) -> None:
        self._link = link
        self._device = (request.payload[0] if isinstance(request, Gather) else request.tensor).device
        self._moves: Generator[Op, Any, Any] = link.exchange.moves(request, link.position)
        self._base = base
        self._sent_to: Counter[int] = Counter()
        self._received_from: Counter[int] = Counter()
        self._works: list[dist.Work] = []
        self._op: Op | None = None
        self._got: Any = None
        self._answer: Any = None
        self.sent_bytes = 0
        self.done = False
        self._step(None)

    def future(self) -> "torch.futures.Future[Any] | None":
        """Future of the communication in flight, if the backend has one; once it is done, `advance` does not block."""
        if len(self._works) != 1 or not isinstance(self._op, AllReduce | AllGather):
            return None
        future: torch.futures.Future[Any] = self._works[0].get_future()
        return future

    def advance(self) -> bool:
        """Wait for the communication in flight and issue the next one; returns True when the answer is complete."""
        if not self.done:
            for work in self._works:
                work.wait()
            self._step(self._received())
        return self.done

    def wait(self) -> Any:
        """The answer to the request."""
        while not self.advance():
            pass
        return self._answer

    def _step(self, got: Any) -> None:
        try:
            with torch.no_grad():
                self._op = self._moves.send(got)
        except StopIteration as end:
            self._answer, self.done = end.value, True
            self._op, self._got, self._works = None, None, []
            return
        size = op_bytes(self._op, self._link.position.world)
        self.sent_bytes += size
        self._link.count(size)
        self._issue(self._op)

    def _issue(self, op: Op) -> None:
        group = self._link.group
        works: list[dist.Work | None] = []
        if isinstance(op, AllReduce):
            self._got = op.tensor
            works = [dist.all_reduce(op.tensor, group=group, async_op=True)] if op.tensor.numel() else []
        elif isinstance(op, AllGather):
            self._got = op.buffer.new_empty(self._link.position.world * op.buffer.numel())
            if op.buffer.numel():
                works = [_all_gather(self._got, op.buffer, group=group, async_op=True)]
        else:
            self._got = {r: torch.empty(n, dtype=torch.uint8, device=self._device) for r, n in op.recvs.items()}
            works = self._move(op.sends, self._got)
        self._works = [work for work in works if work is not None]

    def _move(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> list[dist.Work | None]:
        group, got, sent = self._link.group, self._received_from, self._sent_to
        # Receives first: a message without a posted receive stays in the sender's memory.
        ops = [_p2p(dist.irecv, b, group, r, self._tag(r, got)) for r, b in recvs.items() if b.numel()]
        ops += [_p2p(dist.isend, b.contiguous(), group, r, self._tag(r, sent)) for r, b in sends.items() if b.numel()]
        return list(dist.batch_isend_irecv(ops)) if ops else []

    def _tag(self, peer: int, counter: Counter[int]) -> int:
        """The launch's number plus the number of this message between the two ranks; both ranks count the same."""
        counter[peer] += 1
        return self._base + counter[peer]

    def _received(self) -> Any:
        if isinstance(self._op, AllGather):
            return list(self._got.view(self._link.position.world, -1))
        return self._got


def _p2p(call: Any, buffer: Tensor, group: dist.ProcessGroup | None, peer: int, tag: int) -> dist.P2POp:
    return dist.P2POp(call, buffer, group=group, tag=tag, group_peer=peer)


def connect(exchange: str | Exchange, process_group: dist.ProcessGroup | None = None) -> Link:
    """Link an exchange to a process group (default: the default group). All its ranks must call this."""
    return Link(exchange, process_group)
