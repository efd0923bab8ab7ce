"""Heartbeat records of ranks, the state of their processes, and the diagnosis of a failed exchange.

Nothing here talks to a store; `diagnose` is a pure function.
"""

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

TEXT_LIMIT = 300
"""Characters of a text that other ranks will read."""

# Kinds of diagnosis, the most certain first.
LOST, BEHIND, UNKNOWN = "lost", "behind", "unknown"
MISUSE = "misuse"
"""Kind of an alarm for an error of the user that ends all ranks; they raise its text as it is."""

# Results of `process_state`.
GONE, STOPPED, RUNNING = "gone", "stopped", "running"


@dataclass(frozen=True)
class Record:
    """A dataclass that is kept in a store as JSON."""

    def encode(self) -> str:
        """The record as text for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The record that `encode` wrote."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(data).items()})


@dataclass(frozen=True)
class RankProcess(Record):
    """The process of one rank: enough to name it, and to find it if it runs on this machine."""

    host: str
    pid: int
    started: int  # in clock ticks since boot, so that a reused pid is not mistaken for the rank
    machine: str  # boot id and pid namespace; empty if the system does not provide them


@dataclass(frozen=True)
class Heartbeat(Record):
    """A counter that advances while the process runs, and what the rank is doing."""

    count: int
    doing: str
    wall: float  # seconds since the epoch on the rank's own clock: for messages only, never to decide anything
    failed: bool = False  # the rank itself has found a failure: it is a victim, not the cause
    passes: int = 0  # backward passes that it has begun to average
    agreements: int = 0  # agreements on a change before a pass that it has joined
    end: str | None = None  # why the rank left on purpose; an empty text is a clean end


@dataclass(frozen=True)
class Observation:
    """What one rank saw of a peer while it watched: the peer's first and last heartbeat in that time."""

    first: Heartbeat | None
    last: Heartbeat | None
    process: RankProcess | None = None
    state: str | None = None  # result of `process_state`; None if the peer is not on this machine

    @property
    def advanced(self) -> bool:
        """Whether the peer wrote a heartbeat in that time."""
        return self.last is not None and (self.first is None or self.last.count > self.first.count)

    @property
    def conclusive(self) -> bool:
        """Whether watching longer could not change what we say about this peer."""
        ended = self.last is not None and self.last.end is not None
        return ended or self.advanced or self.state in (GONE, STOPPED)

    @property
    def is_victim(self) -> bool:
        """Whether the peer had itself found the failure."""
        return self.last is not None and self.last.failed

    @property
    def progressed(self) -> bool:
        """Whether the peer did different things at the first and the last heartbeat."""
        return self.first is not None and self.last is not None and self.first.doing != self.last.doing


@dataclass(frozen=True)
class Diagnosis(Record):
    """Which ranks (global) caused a failure, how certain that is (`kind`), and the sentence for the user."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    by: int | None = None  # the rank that has raised the alarm with it


def this_process() -> RankProcess:
    """The record of this process."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
        started = int(_stat(pid)[19])
    except OSError:
        machine, started = "", 0
    return RankProcess(host=socket.gethostname(), pid=pid, started=started, machine=machine)


def process_state(process: RankProcess, own: RankProcess) -> str | None:
    """`gone`, `stopped` or `running` for a process on this machine; None if it cannot be seen from here."""
    if not process.machine or process.machine != own.machine:
        return None
    try:
        os.kill(process.pid, 0)
        stat = _stat(process.pid)
    except (ProcessLookupError, FileNotFoundError):
        return GONE
    except OSError:  # no permission
        return None
    if stat[0] in "ZX" or int(stat[19]) != process.started:
        return GONE
    return STOPPED if stat[0] in "Tt" else RUNNING


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat, from the state on; the process name before it may contain spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def diagnose(
    doing: str,
    peers: Mapping[int, Observation],
    *,
    global_rank: Callable[[int], int],
    own: RankProcess,
    now: float,
    watched: float,
) -> Diagnosis:
    """Why an exchange failed, from what one rank (itself `doing` this) saw of all others in `watched` seconds.

    Lost ranks explain everything. If there are none, ranks that are alive and late do. Otherwise the cause is unknown.
    """

    def result(kind: str, texts: Mapping[int, str]) -> Diagnosis:
        sentences = [f"{describe_rank(global_rank(rank), peers[rank].process)} {text}" for rank, text in texts.items()]
        return Diagnosis(kind, tuple(global_rank(rank) for rank in texts), "; ".join(sentences))

    lost = {rank: text for rank, seen in peers.items() if (text := _lost(seen, own=own, now=now, watched=watched))}
    # A rank that had found the failure before it ended is blamed only if there is no other cause.
    causes = {rank: text for rank, text in lost.items() if not peers[rank].is_victim}
    if causes:
        return result(LOST, causes)
    late = {rank: text for rank, seen in peers.items() if rank not in lost and (text := _late(doing, seen))}
    if late:
        stuck = {rank: text for rank, text in late.items() if not peers[rank].progressed}
        return result(BEHIND, stuck or late)
    if lost:
        return result(LOST, lost)
    where = "; ".join(f"rank {global_rank(rank)} at '{s.last.doing}'" for rank, s in list(peers.items())[:8] if s.last)
    return Diagnosis(
        UNKNOWN, (), f"the exchange failed though all ranks are alive ({where or 'there is no other rank'})"
    )


def describe_rank(rank: int, process: RankProcess | None, note: str = "") -> str:
    """`rank 2 (host h, pid 71)`, with a note if there is one."""
    parts = [f"host {process.host}, pid {process.pid}"] if process else []
    parts += [note] if note else []
    return f"rank {rank} ({'; '.join(parts)})" if parts else f"rank {rank}"


def _lost(seen: Observation, *, own: RankProcess, now: float, watched: float) -> str:
    beat = seen.last
    if beat is None and seen.state is None:
        return "never joined: it has sent no heartbeat"
    doing = f", doing: {beat.doing}" if beat else ""
    if beat and beat.end is not None:
        return f"ended with {beat.end}{doing}" if beat.end else f"ended on purpose{doing}"
    if seen.state == GONE:
        how = "is dead"
    elif seen.state == STOPPED:
        how = "is stopped (SIGSTOP or a debugger)"
    elif seen.advanced or seen.state == RUNNING:
        return ""
    else:
        how = "is stopped or dead"
    return f"{how}: {_silence(seen, own, now, watched)}{doing}"


def _silence(seen: Observation, own: RankProcess, now: float, watched: float) -> str:
    if seen.last is None:
        return "it has sent no heartbeat"
    if seen.process and seen.process.machine and seen.process.machine == own.machine:  # the same clock
        return f"last heartbeat {max(0.0, now - seen.last.wall):.1f} s ago"
    return f"no heartbeat in the {watched:.1f} s that this rank watched"


def _late(doing: str, seen: Observation) -> str:
    beat = seen.last
    if beat is None or not seen.advanced:
        at = f" at '{beat.doing}'" if beat else ""
        return f"is alive but sends no heartbeat{at}: its process runs (native code that holds the GIL, or no network?)"
    if beat.failed or not _is_before(beat.doing, doing):
        return ""
    guess = "and makes progress (slow?)" if seen.progressed else "(stuck in user code?)"
    return f"is alive but has not joined: it is at '{beat.doing}' {guess}"


def _is_before(theirs: str, ours: str) -> bool:
    """Whether a rank doing `theirs` has not yet reached the point where a rank doing `ours` waits."""
    their_step, our_step = _step(theirs), _step(ours)
    if their_step is not None and our_step is not None and their_step != our_step:
        return their_step < our_step
    return theirs != ours and "wait" not in theirs


def _step(doing: str) -> int | None:
    found = re.match(r"step (\d+)", doing)
    return int(found[1]) if found else None
