"""Idle time of a GPU, by what the host did meanwhile, and the time that the host waited for the GPU."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from syncline.trace.span import MAX_COUNT, MAX_TIME_NS

HOST_WAIT, KERNEL_WAIT, OTHER_WAIT = "host wait", "kernel wait", "other wait"
"""Why a GPU was idle: the next kernel was launched too late, the gap is the usual one between two kernels, or neither
(such as a wait for another stream). HTA has the same kinds."""

IDLE_KINDS = (HOST_WAIT, KERNEL_WAIT, OTHER_WAIT)
"""All of them."""

BEFORE_FORWARD = "Python before the forward pass"
"""What the host did where it may have loaded data, but no loader was timed."""

DATA_LOADING = "data loading"
"""What the host did in idle time that counts as the phase `data`."""


@dataclass(frozen=True, slots=True)
class IdleTime:
    """Gaps of one step in which no kernel and no copy ran, of one kind and with the same work of the host."""

    step: int
    kind: str
    doing: str
    count: int
    ns: int
    longest_ns: int


@dataclass(frozen=True, slots=True)
class BlockedTime:
    """Calls of one step in which the host waited for work of the GPU: synchronisation and blocking copies."""

    step: int
    doing: str
    count: int
    ns: int


@dataclass(frozen=True)
class GpuActivity:
    """What one rank's GPU and host waited for."""

    idle: tuple[IdleTime, ...] = ()
    blocked: tuple[BlockedTime, ...] = ()
    streams: dict[str, dict[str, int]] = field(default_factory=dict)
    """By stream: nanoseconds between its kernels, by kind."""

    def with_more(self, other: "GpuActivity") -> "GpuActivity":
        """This and a later part of the same rank's trace."""
        streams = {
            stream: {
                kind: self.streams.get(stream, {}).get(kind, 0) + other.streams.get(stream, {}).get(kind, 0)
                for kind in IDLE_KINDS
            }
            for stream in sorted({*self.streams, *other.streams})
        }
        return GpuActivity(self.idle + other.idle, self.blocked + other.blocked, streams)

    def as_json(self) -> dict[str, Any]:
        """Plain data, for the metadata of a trace."""
        idle = [[row.step, row.kind, row.doing, row.count, row.ns, row.longest_ns] for row in self.idle]
        blocked = [[row.step, row.doing, row.count, row.ns] for row in self.blocked]
        return {"idle": idle, "blocked": blocked, "streams": self.streams}


def gpu_activities(metadata: object) -> dict[int, GpuActivity]:
    """By rank, from the entry `gpu` of a trace's metadata, which may hold anything; invalid rows are left out."""
    if not isinstance(metadata, dict):
        return {}
    return {
        int(rank): GpuActivity(
            tuple(IdleTime(*row) for row in _rows(one.get("idle"), [int, str, str, int, int, int])),
            tuple(BlockedTime(*row) for row in _rows(one.get("blocked"), [int, str, int, int])),
            _streams(one.get("streams")),
        )
        for rank, one in metadata.items()
        if isinstance(rank, str) and rank.isdecimal() and len(rank) < 10 and isinstance(one, dict)
    }


def _rows(content: object, types: list[type]) -> Iterable[list[Any]]:
    for row in content if isinstance(content, list) else ():
        if isinstance(row, list) and [type(value) for value in row] == types:
            counts = [value for value in row[1:] if isinstance(value, int)]
            if -MAX_COUNT < row[0] < MAX_COUNT and all(0 <= value < MAX_TIME_NS for value in counts):
                yield row


def _streams(content: object) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for stream, times in content.items() if isinstance(content, dict) else ():
        if isinstance(times, dict) and all(type(ns) is int and 0 <= ns < MAX_TIME_NS for ns in times.values()):
            found[stream] = {kind: times.get(kind, 0) for kind in IDLE_KINDS}
    return found
