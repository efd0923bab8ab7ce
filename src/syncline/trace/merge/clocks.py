"""Ranks' clocks against rank 0's: offsets from round trips over a process group, drift from two such measurements.

A round trip bounds the offset from both sides: a message is never received before it was sent. The least of all upper
bounds and the greatest of all lower bounds leave an interval that the offset must be in, whatever the load was.
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
TIME = Path("/proc/self/ns/time")

_TAG = 7_290
_FEWEST, _MOST = 8, 100
_GOOD_NS = 60_000  # an error as small as this is not worth more round trips
_BUDGET_NS = 150_000_000  # for each peer: a far one costs time, and its error is its distance anyway
_MORE, _END = 1, 0


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One message there and back: `sent` and `returned` on rank 0's clock, `received` and `answered` on the other's."""

    sent: int
    received: int
    answered: int
    returned: int


@dataclass(frozen=True, slots=True)
class Clock:
    """A rank's clock: `offset` nanoseconds ahead of rank 0's at its own time `at`, and `drift` more in each one after.

    `error` bounds how far an aligned time can be from the truth.
    """

    offset: float = 0.0
    drift: float = 0.0
    error: float = 0.0
    at: int = 0

    def align(self, ns: int) -> int:
        """A time of this clock on rank 0's."""
        return ns - round(self.offset + self.drift * (ns - self.at))


def host() -> str:
    """The same text for processes that read the same clock: one boot of one kernel, one time namespace."""
    try:
        return f"{BOOT_ID.read_text().strip()} {TIME.readlink() if TIME.exists() else ''}".strip()
    except OSError:
        return f"{socket.gethostname()}-{os.getpid()}"


def offset_of(trips: Sequence[RoundTrip]) -> tuple[float, float]:
    """How far the other clock is ahead, and the error of that, in nanoseconds.

    >>> offset_of([RoundTrip(sent=0, received=1010, answered=1020, returned=30)])
    (1000.0, 10.0)
    """
    if not trips:
        raise ValueError("no round trip was made: an offset needs at least one")
    most = min(trip.received - trip.sent for trip in trips)
    least = max(trip.answered - trip.returned for trip in trips)
    # They cross only where the clocks drift within the measurement; then the difference is the error all the same.
    return (most + least) / 2, abs(most - least) / 2


def drifting(first: Clock, last: Clock) -> Clock:
    """The clock between two measurements: it drifts evenly from one to the other."""
    passed = last.at - first.at
    if passed <= 0:
        return last
    drift = (last.offset - first.offset) / passed
    return Clock(first.offset, drift, max(first.error, last.error), first.at)


def measure(group: dist.ProcessGroup | None = None, *, now: Now = time.perf_counter_ns) -> list[Clock]:
    """The clocks of all ranks of a group against its first rank's, on every rank; all ranks call this together.

    The group's backend must be Gloo: the messages are on the CPU. `drift` is 0: for that, measure again later and pass
    both to `drifting`.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    # Doubles hold nanoseconds exactly for a hundred days; clocks count from a machine's start, so `at` goes in whole.
    found = torch.zeros(world, 2, dtype=torch.float64)
    times = torch.zeros(world, dtype=torch.int64)
    if rank == 0:
        for peer in range(1, world):
            trips = _ask(peer, group, now)
            found[peer, 0], found[peer, 1] = offset_of(trips)
            times[peer] = trips[-1].answered
    else:
        _answer(group, now)
    if world > 1:
        dist.broadcast(found, group=group, group_src=0)
        dist.broadcast(times, group=group, group_src=0)
    return [
        Clock(offset, 0.0, error, at)
        for (offset, error), at in zip(found.tolist(), times.tolist(), strict=True)
    ]  # fmt: skip


def _ask(peer: int, group: dist.ProcessGroup | None, now: Now) -> list[RoundTrip]:
    trips: list[RoundTrip] = []
    word, stamps = torch.full((1,), _MORE), torch.zeros(2, dtype=torch.int64)
    begun = time.perf_counter_ns()
    # A slow one does no harm, since only the best bounds count.
    while len(trips) < _FEWEST or _is_worth_more(trips, time.perf_counter_ns() - begun):
        sent = now()
        dist.send(word, group=group, group_dst=peer, tag=_TAG)
        dist.recv(stamps, group=group, group_src=peer, tag=_TAG)
        returned = now()
        received, answered = stamps.tolist()
        trips.append(RoundTrip(sent, received, answered, returned))
    dist.send(word.fill_(_END), group=group, group_dst=peer, tag=_TAG)
    return trips


def _is_worth_more(trips: Sequence[RoundTrip], spent_ns: int) -> bool:
    return len(trips) < _MOST and spent_ns < _BUDGET_NS and offset_of(trips)[1] > _GOOD_NS


def _answer(group: dist.ProcessGroup | None, now: Now) -> None:
    word, stamps = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(word, group=group, group_src=0, tag=_TAG)
        received = now()
        if word.item() == _END:
            return
        stamps[0] = received
        stamps[1] = now()
        dist.send(stamps, group=group, group_dst=0, tag=_TAG)
