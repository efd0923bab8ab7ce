"""Probes of the network between two steps: bandwidth, latency, and how much traffic slows down compute.

All ranks probe together. On the CPU, latency is measured while every rank computes: a message waits until a thread that
can receive it gets a core.
"""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from syncline._compat.tensors import NoSubclasses
from syncline.codecs import Mean, Merge
from syncline.exchange import EXCHANGES, Exchange, Link, Position
from syncline.exchange.definition import Definition
from syncline.exchange.moves import Moves, among
from syncline.threads import in_thread

T = TypeVar("T")

_SIZES = (1 << 14, 1 << 17, 1 << 19)
"""float32 values of the messages that measure latency and bandwidth."""
_TIMED = 2
_WATCH_SIZE = 1 << 18
WATCH_BYTES = 4 * _WATCH_SIZE
"""float32 values of the message that watches the link of a running job, and its bytes."""
_BUSY_SIZE, _BUSY_MESSAGES = 1 << 14, 9
"""The same for the messages that measure latency while ranks compute, and their number."""
_LOAD_SIZE, _LOAD_S, _LOAD_MESSAGES = 1 << 18, 0.1, 64
"""The same for the messages that keep the network busy, for about how long, and their largest number."""
_MATRIX = 256
"""Side of the matrices that are multiplied meanwhile; one product takes about a millisecond."""


def synchronized_time(device: torch.device) -> float:
    """Seconds on the host's clock, when the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def inside_nodes(node: int) -> Exchange:
    """An exchange that adds dense values inside each node of `node` ranks, in all nodes at the same time."""

    def merge(merge: Merge, position: Position) -> Moves:
        first = position.rank - position.rank % node
        members = range(first, min(first + node, position.world))
        at = Position(position.rank - first, len(members), len(members))
        return among(members, at.rank, EXCHANGES.get("sharded").merge(merge, at))

    return Exchange(Definition("inside", merge, None, adds_only=True, workers=None), (), "inside")


def link_samples(link: Link, device: torch.device, *, ranks: int) -> list[tuple[float, float]]:
    """(bytes that a rank sends, seconds) of dense sums over `ranks` ranks, one after the other."""
    samples = []
    for count in _SIZES:
        tensor = torch.zeros(count, device=device)
        seconds = statistics.median(_all_reduce_seconds(link, tensor, _TIMED))
        samples.append((_sent_bytes(ranks, tensor), seconds))
    return samples


def message_seconds(link: Link, device: torch.device, *, messages: int = _TIMED) -> float:
    """Seconds of an all-reduce of 1 MiB, the smallest of some messages: other activity can only add time."""
    return min(_all_reduce_seconds(link, torch.zeros(_WATCH_SIZE, device=device), messages))


def busy_latency(link: Link, bytes_per_s: float, *, ranks: int) -> float:
    """Seconds of a sum over `ranks` ranks beyond the time for its bytes; run it in `while_computing`."""
    tensor = torch.zeros(_BUSY_SIZE)
    seconds = statistics.median(_all_reduce_seconds(link, tensor, _BUSY_MESSAGES - 1))
    return max(0.0, seconds - _sent_bytes(ranks, tensor) / bytes_per_s)


def compute_slowdown(link: Link, bytes_per_s: float, barrier: Callable[[], None]) -> float:
    """Seconds of compute lost per second in which the network is busy. `barrier` lets all ranks start together."""
    tensor = torch.zeros(_LOAD_SIZE)
    messages = int(min(_LOAD_MESSAGES, max(2, _LOAD_S * bytes_per_s / _sent_bytes(link.position.world, tensor))))

    def load() -> None:
        for _ in range(messages):
            link.ask(Mean(tensor))

    barrier()
    _, alone = while_computing(lambda: time.sleep(_LOAD_S))
    barrier()
    _, shared = while_computing(load)
    return max(0.0, alone / shared - 1)


def while_computing(work: Callable[[], T]) -> tuple[T, float]:
    """Do `work` in a thread while this thread computes: its result, and matrix products per second."""

    def run() -> T:
        with torch.no_grad(), NoSubclasses():
            return work()

    a, out = torch.full((_MATRIX, _MATRIX), 1e-3), torch.empty(_MATRIX, _MATRIX)
    count, begin = 0, time.perf_counter()
    result = in_thread(run, name="syncline-probe")
    with torch.no_grad():
        while not count or not result.done():
            torch.mm(a, a, out=out)
            count += 1
    rate = count / (time.perf_counter() - begin)
    return result.result(), rate


def _sent_bytes(ranks: int, tensor: Tensor) -> float:
    """Bytes that one of `ranks` ranks sends in a ring all-reduce, or in a sharded one."""
    return 2 * (ranks - 1) * tensor.nbytes / ranks


def _all_reduce_seconds(link: Link, tensor: Tensor, count: int) -> list[float]:
    """Seconds of `count` all-reduces, after one as a warm-up: an idle traffic shaper lets the first pass too fast."""
    seconds = []
    for _ in range(count + 1):
        begin = synchronized_time(tensor.device)
        link.ask(Mean(tensor))
        seconds.append(synchronized_time(tensor.device) - begin)
    return seconds[1:]
