"""What ranks tell about themselves while they run, and the verdict a survivor draws from it.

Nothing here talks to a store: records, the state of a process on this machine, and one pure function, `judge`.
"""

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT = 300  # characters of a text that other ranks will read

# What `judge` found, the most certain first.
LOST, BEHIND, UNKNOWN = "lost", "behind", "unknown"

# What `process_state` found.
GONE, STOPPED, RUNNING = "gone", "stopped", "running"


@dataclass(frozen=True)
class Who:
    """One rank's process: enough to name it, and to find it again where `machine` is our own."""

    host: str
    pid: int
    born: int  # start time in clock ticks since boot, so that a reused pid is not taken for the rank
    machine: str  # boot id and pid namespace; empty where the system does not tell

    def encode(self) -> str:
        """The record as text for a store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(data: bytes) -> "Who":
        """The record that `encode` wrote."""
        return Who(**json.loads(data))


@dataclass(frozen=True)
class Beat:
    """One heartbeat: a counter that advances while the process runs, and what the rank is doing."""

    count: int
    doing: str
    wall: float  # seconds since the epoch on the rank's own clock: for messages, never for judgement
    failed: bool = False  # the rank has itself found a failure: it is a victim, not the reason
    end: str | None = None  # why the rank left on purpose; an empty text is a clean end

    def encode(self) -> str:
        """The record as text for a store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(data: bytes) -> "Beat":
        """The record that `encode` wrote."""
        return Beat(**json.loads(data))


@dataclass(frozen=True)
class Sight:
    """What one look at a peer saw: its first and its last heartbeat while we looked."""

    first: Beat | None
    last: Beat | None
    who: Who | None = None
    process: str | None = None  # of `process_state`; None where the peer is not on this machine

    @property
    def advanced(self) -> bool:
        """Whether the peer wrote a heartbeat while we looked."""
        return self.last is not None and (self.first is None or self.last.count > self.first.count)

    @property
    def decided(self) -> bool:
        """Whether looking longer could not change what we say about this peer."""
        ended = self.last is not None and self.last.end is not None
        return ended or self.advanced or self.process in (GONE, STOPPED)


@dataclass(frozen=True)
class Verdict:
    """Which ranks (by name) are the reason of a failure, how sure that is, and the sentence for the user."""

    kind: str
    ranks: tuple[int, ...]
    text: str


def this_process() -> Who:
    """The record of this process."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
        born = int(_stat(pid)[19])
    except OSError:
        machine, born = "", 0
    return Who(host=socket.gethostname(), pid=pid, born=born, machine=machine)


def process_state(who: Who, here: Who) -> str | None:
    """`gone`, `stopped` or `running` for a process of this machine; None when it cannot be seen from here."""
    if not who.machine or who.machine != here.machine:
        return None
    try:
        os.kill(who.pid, 0)
        stat = _stat(who.pid)
    except (ProcessLookupError, FileNotFoundError):
        return GONE
    except OSError:  # not ours to look at
        return None
    if stat[0] in "ZX" or int(stat[19]) != who.born:
        return GONE
    return STOPPED if stat[0] in "Tt" else RUNNING


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may hold spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def judge(
    doing: str, sights: Mapping[int, Sight], *, name: Callable[[int], int], here: Who, now: float, looked: float
) -> Verdict:
    """Why an exchange failed, from what one rank (which was `doing` this) saw of all others in `looked` seconds.

    Ranks that are lost explain everything; failing that, ranks that are alive and late; failing that, nobody knows.
    """
    lost = {rank: text for rank, sight in sights.items() if (text := _lost(sight, here=here, now=now, looked=looked))}
    # A rank that had itself found the failure before it went is a reason only where there is no other.
    reasons = {rank: text for rank, text in lost.items() if not _victim(sights[rank])}
    if reasons:
        return _verdict(LOST, reasons, sights, name)
    late = {rank: text for rank, sight in sights.items() if rank not in lost and (text := _late(doing, sight))}
    if late:
        stuck = {rank: text for rank, text in late.items() if not _moves(sights[rank])}
        return _verdict(BEHIND, stuck or late, sights, name)
    if lost:
        return _verdict(LOST, lost, sights, name)
    where = "; ".join(f"rank {name(rank)} at '{s.last.doing}'" for rank, s in list(sights.items())[:8] if s.last)
    return Verdict(UNKNOWN, (), f"the exchange failed though all ranks are alive ({where or 'there is no other rank'})")


def named(rank: int, who: Who | None, note: str = "") -> str:
    """`rank 2 (host h, pid 71)`, with a note where there is one."""
    parts = [f"host {who.host}, pid {who.pid}"] if who else []
    parts += [note] if note else []
    return f"rank {rank} ({'; '.join(parts)})" if parts else f"rank {rank}"


def _verdict(
    kind: str, texts: Mapping[int, str], sights: Mapping[int, Sight], name: Callable[[int], int]
) -> Verdict:  # fmt: skip
    sentences = [f"{named(name(rank), sights[rank].who)} {text}" for rank, text in texts.items()]
    return Verdict(kind, tuple(name(rank) for rank in texts), "; ".join(sentences))


def _victim(sight: Sight) -> bool:
    return sight.last is not None and sight.last.failed


def _moves(sight: Sight) -> bool:
    return sight.first is not None and sight.last is not None and sight.first.doing != sight.last.doing


def _lost(sight: Sight, *, here: Who, now: float, looked: float) -> str:
    beat = sight.last
    if beat is None and sight.process is None:
        return "never came: it has sent no heartbeat"
    doing = f", doing: {beat.doing}" if beat else ""
    if beat and beat.end is not None:
        return f"ended with {beat.end}{doing}" if beat.end else f"ended on purpose{doing}"
    if sight.process == GONE:
        return f"is dead: {_silence(sight, here, now, looked)}{doing}"
    if sight.process == STOPPED:
        return f"is stopped (SIGSTOP or a debugger): {_silence(sight, here, now, looked)}{doing}"
    if sight.advanced or sight.process == RUNNING:
        return ""
    return f"is stopped or dead: {_silence(sight, here, now, looked)}{doing}"


def _silence(sight: Sight, here: Who, now: float, looked: float) -> str:
    if sight.last is None:
        return "it has sent no heartbeat"
    if sight.who and sight.who.machine and sight.who.machine == here.machine:  # one clock, so ages can be told
        return f"last heartbeat {max(0.0, now - sight.last.wall):.1f} s ago"
    return f"no heartbeat in the {looked:.1f} s that this rank looked"


def _late(doing: str, sight: Sight) -> str:
    beat = sight.last
    if beat is None or not sight.advanced:
        at = f" at '{beat.doing}'" if beat else ""
        return f"is alive but sends no heartbeat{at}: its process runs (native code that holds the GIL?)"
    if beat.failed or not _before(beat.doing, doing):
        return ""
    if _moves(sight):
        return f"is alive but has not come: it is at '{beat.doing}' and moves on (slow?)"
    return f"is alive but has not come: it is at '{beat.doing}' (stuck in user code?)"


def _before(theirs: str, ours: str) -> bool:
    """Whether a rank doing `theirs` has yet to come to where a rank doing `ours` waits."""
    their_step, our_step = _step(theirs), _step(ours)
    if their_step is not None and our_step is not None and their_step != our_step:
        return their_step < our_step
    return theirs != ours and "wait" not in theirs


def _step(doing: str) -> int | None:
    found = re.match(r"step (\d+)", doing)
    return int(found[1]) if found else None
