"""Alignment of the ranks' clocks with rank 0's: offsets from round trips over a process group, and drift.

A message is never received before it was sent, so each round trip bounds the offset from both sides. The smallest of
all upper bounds and the largest of all lower bounds leave an interval that contains the offset, under any load.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

Now = Callable[[], int]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TIME_NAMESPACE = Path("/proc/self/ns/time")

_TAG = 7_290
_MIN_TRIPS, _MAX_TRIPS = 8, 100
_GOOD_ERROR_NS = 60_000  # below this error more round trips are not worth their time
_BUDGET_NS = 150_000_000  # for each peer: with a distant one more round trips do not reduce the error
_CONTINUE, _END = 1, 0


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One message and its answer: `sent` and `returned` on rank 0's clock, `received` and `answered` on the peer's."""

    sent: int
    received: int
    answered: int
    returned: int


@dataclass(frozen=True, slots=True)
class Clock:
    """A rank's clock: `offset` nanoseconds ahead of rank 0's at its own time `at`, plus `drift` for each one after.

    `error` bounds how far an aligned time can be from the truth.
    """

    offset: float = 0.0
    drift: float = 0.0
    error: float = 0.0
    at: int = 0

    def align(self, ns: int) -> int:
        """Convert a time of this clock into rank 0's."""
        return ns - round(self.offset + self.drift * (ns - self.at))


def host_id() -> str:
    """The same text for all processes that read the same clock: one boot of one kernel, and one time namespace."""
    try:
        return f"{BOOT_ID.read_text().strip()} {TIME_NAMESPACE.readlink() if TIME_NAMESPACE.exists() else ''}".strip()
    except OSError:
        return f"{socket.gethostname()}-{os.getpid()}"


def node_name() -> str:
    """The name of this host, or of the emulated node that this process runs on."""
    node = os.environ.get("SYNCLINE_NODE")
    return socket.gethostname() if node is None else f"node {node}"


def clock_offset(trips: Sequence[RoundTrip]) -> tuple[float, float]:
    """How far the peer's clock is ahead, and the error of that, in nanoseconds.

    >>> clock_offset([RoundTrip(sent=0, received=1010, answered=1020, returned=30)])
    (1000.0, 10.0)
    """
    if not trips:
        raise ValueError("an offset needs at least one round trip")
    most = min(trip.received - trip.sent for trip in trips)
    least = max(trip.answered - trip.returned for trip in trips)
    # The bounds cross only if the clocks drift during the measurement; the difference is still the error.
    return (most + least) / 2, abs(most - least) / 2


def with_drift(first: Clock, last: Clock) -> Clock:
    """The clock between two measurements, with the drift that leads from one to the other."""
    elapsed = last.at - first.at
    if elapsed <= 0:
        return last
    drift = (last.offset - first.offset) / elapsed
    return Clock(first.offset, drift, max(first.error, last.error), first.at)


def measure_clocks(group: dist.ProcessGroup | None = None, *, now: Now = time.perf_counter_ns) -> list[Clock]:
    """The clocks of all ranks of a group relative to its first rank's, on every rank. All ranks call this together.

    The group must use Gloo, because the messages are on the CPU. `drift` is 0: to get it, measure again later and pass
    both clocks of a rank to `with_drift`.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found = torch.zeros(world, 3, dtype=torch.int64)  # offset and error in half nanoseconds, and the time
    if rank == 0:
        for peer in range(1, world):
            trips = _make_trips(peer, group, now)
            offset, error = clock_offset(trips)
            found[peer] = torch.tensor([round(2 * offset), round(2 * error), trips[-1].answered])
    else:
        _answer_trips(group, now)
    if world > 1:
        dist.broadcast(found, group=group, group_src=0)
    return [Clock(offset / 2, 0.0, error / 2, at) for offset, error, at in found.tolist()]


def _make_trips(peer: int, group: dist.ProcessGroup | None, now: Now) -> list[RoundTrip]:
    trips: list[RoundTrip] = []
    command, stamps = torch.full((1,), _CONTINUE), torch.zeros(2, dtype=torch.int64)
    until = time.perf_counter_ns() + _BUDGET_NS
    # A slow round trip does no harm, since only the best bounds count.
    while len(trips) < _MIN_TRIPS or (
        len(trips) < _MAX_TRIPS and time.perf_counter_ns() < until and clock_offset(trips)[1] > _GOOD_ERROR_NS
    ):
        sent = now()
        dist.send(command, group=group, group_dst=peer, tag=_TAG)
        dist.recv(stamps, group=group, group_src=peer, tag=_TAG)
        returned = now()
        received, answered = stamps.tolist()
        trips.append(RoundTrip(sent, received, answered, returned))
    dist.send(command.fill_(_END), group=group, group_dst=peer, tag=_TAG)
    return trips


def _answer_trips(group: dist.ProcessGroup | None, now: Now) -> None:
    command, stamps = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(command, group=group, group_src=0, tag=_TAG)
        received = now()
        if command.item() == _END:
            return
        stamps[0] = received
        stamps[1] = now()
        dist.send(stamps, group=group, group_dst=0, tag=_TAG)
