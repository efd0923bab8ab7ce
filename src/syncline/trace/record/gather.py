"""All ranks' spans to rank 0 when a recording ends, over the store that the ranks met at.

Nobody is waited for without a limit, and nothing but text travels: each rank puts what it has into the store, rank 0
takes what came in time. Who was not taken, or cannot reach the others, writes a file of its own.
"""

import contextlib
import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from syncline._compat import PrefixStore, Store, default_store, new_group
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.merge.clocks import Clock, measure
from syncline.trace.merge.merge import Merged, Part, merge
from syncline.trace.merge.metadata import together
from syncline.trace.merge.rank_file import write_part
from syncline.trace.span import Span

_CHUNK = 1 << 20  # a store refuses messages of many megabytes
_LOOK_S = 0.02
_GONE = "null"
"""The head of a rank that came and waits no longer."""
_COST = "overhead_ns_per_step"
_WRITTEN, _FAILED = "written", "failed"


@dataclass(frozen=True)
class Seen:
    """What one rank has to say: its part, and what `metadata.together` makes one entry of."""

    part: Part
    cores: int
    usage: Sequence[Sequence[int]]
    recorder: dict[str, Any]
    crashed: str = ""
    """The error with which the loop ended, in a line."""
    notes: tuple[str, ...] = ()
    """What this rank could not record."""

    def text(self) -> bytes:
        """As bytes for the way."""
        clock = self.part.clock
        content = {
            "rank": self.part.rank,
            "host": self.part.host,
            "clock": None if clock is None else asdict(clock),
            "cores": self.cores,
            "usage": [list(row) for row in self.usage],
            "recorder": self.recorder,
            "crashed": self.crashed,
            "notes": self.notes,
            "spans": [span.to_row() for span in self.part.spans],
        }
        return gzip.compress(json.dumps(content).encode(), compresslevel=3)


def read_seen(text: bytes) -> Seen:
    """What `Seen.text` wrote."""
    content = json.loads(gzip.decompress(text))
    rank, clock = content["rank"], content["clock"]
    spans = [Span.from_row(rank, row) for row in content["spans"]]
    part = Part(rank, spans, content["host"], None if clock is None else Clock(**clock))
    return Seen(
        part, content["cores"], content["usage"], content["recorder"], content["crashed"], tuple(content["notes"])
    )


@dataclass(frozen=True)
class Written:
    """What a rank has left: the trace of all on rank 0, its own file where that failed, or nothing."""

    path: Path | None
    notes: tuple[str, ...] = ()


def write_trace(seen: Sequence[Seen], path: Path, *, world_size: int, about: dict[str, Any]) -> Written:
    """One trace of the ranks that are there; the others are told of."""
    merged: Merged = merge([one.part for one in seen])
    here = {one.part.rank for one in seen}
    notes = [f"rank {rank} did not come in time: it is left out" for rank in range(world_size) if rank not in here]
    notes += [f"rank {one.part.rank} ended with an error: {one.crashed}" for one in seen if one.crashed]
    notes += [f"rank {one.part.rank}: {text}" for one in seen for text in one.notes]
    notes += merged.notes
    if len({one.part.host for one in seen}) > 1 and merged.clock_error_ns is not None:
        notes.append("the hosts' clocks were measured once, when the recording ended: drift before it is not corrected")
    ranks = together(
        hosts={one.part.rank: one.part.host for one in seen},
        cores={one.part.rank: one.cores for one in seen},
        usage={one.part.rank: one.usage for one in seen},
        recorders=[{**one.recorder, _COST: one.recorder.get(_COST) or 0.0} for one in seen],
    )
    if all(one.recorder.get(_COST) is None for one in seen):
        del ranks["recorder"][_COST]
    metadata = {**about, "world_size": world_size, "clock_error_ns": merged.clock_error_ns, "notes": notes} | ranks
    path.parent.mkdir(parents=True, exist_ok=True)
    write_chrome_trace(merged.spans, path, metadata=metadata)
    return Written(path, tuple(notes))


def collect(seen: Seen, path: Path, *, number: int, timeout_s: float, about: dict[str, Any]) -> Written:
    """Bring the ranks' spans together: the trace at `path` on rank 0, at most `timeout_s` seconds later.

    `number` counts a process's recordings: all ranks' n-th belong together.
    """
    world = dist.get_world_size()
    try:
        store = PrefixStore(prefix(number), default_store())
        if seen.part.rank == 0:
            return _gather(seen, store, path, world=world, timeout_s=timeout_s, about=about)
        return _give(seen, store, path, world=world, timeout_s=timeout_s)
    except (RuntimeError, ValueError, OSError) as error:  # a store that is gone; DistError is a RuntimeError
        kept = write_own(seen, path, world_size=world)
        return Written(kept, (f"the ranks' spans were not brought together ({_line(error)}): {kept} has this rank's",))


def prefix(number: int) -> str:
    """Where a recording's keys are in the store."""
    return f"syncline/trace/{number}"


def write_own(seen: Seen, path: Path, *, world_size: int) -> Path:
    """This rank's spans in a file beside the trace; `syncline trace export` of the folder merges them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_part(seen.part, path.parent, world_size=world_size)


def _gather(
    mine: Seen, store: Store, path: Path, *, world: int, timeout_s: float, about: dict[str, Any]
) -> Written:  # fmt: skip
    until = time.monotonic() + timeout_s
    told = {rank: json.loads(_get(store, f"{rank}", until) or _GONE) for rank in range(1, world)}
    heads = {rank: head for rank, head in told.items() if head is not None}
    hosts = {mine.part.host, *(head["host"] for head in heads.values())}
    whole = len(heads) == world - 1 and not mine.crashed and not any(head["crashed"] for head in heads.values())
    clocks = whole and len(hosts) > 1
    store.set("decided", json.dumps({"ranks": [0, *heads], "clocks": clocks}))
    measured: Sequence[Clock | None] = [None] * world
    if clocks:
        try:
            measured = _measure(world, timeout_s)
        except (RuntimeError, ValueError, OSError) as error:
            mine = replace(mine, notes=(*mine.notes, f"the hosts' clocks could not be measured ({_line(error)})"))
    seen = [replace(mine, part=replace(mine.part, clock=measured[0]))]
    for rank, head in heads.items():
        text = b"".join(store.get(f"{rank}/{index}") for index in range(head["chunks"]))
        one = read_seen(text)
        seen.append(replace(one, part=replace(one.part, clock=measured[rank])))
        for index in range(head["chunks"]):
            store.delete_key(f"{rank}/{index}")
    try:
        written = write_trace(seen, path, world_size=world, about=about)
    except OSError:
        store.set("done", _FAILED)
        raise
    store.set("done", _WRITTEN)
    return written


def _give(mine: Seen, store: Store, path: Path, *, world: int, timeout_s: float) -> Written:
    rank, text = mine.part.rank, mine.text()
    chunks: list[Any] = [text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK)]
    for index, chunk in enumerate(chunks):
        store.set(f"{rank}/{index}", chunk)
    head = {"host": mine.part.host, "chunks": len(chunks), "crashed": bool(mine.crashed)}
    store.set(f"{rank}", json.dumps(head))
    # Rank 0 may have come just before its own time was up. After an error nobody should wait long to be told of it.
    until = time.monotonic() + timeout_s * (1 if mine.crashed else 2)
    decided = _get(store, "decided", until)
    if decided is not None:
        told = json.loads(decided)
        if rank in told["ranks"]:
            if told["clocks"]:
                with contextlib.suppress(RuntimeError, ValueError, OSError):  # rank 0 goes on without, and says so
                    _measure(world, timeout_s)
                until = max(until, time.monotonic() + timeout_s)
            if _get(store, "done", until) == _WRITTEN.encode():
                return Written(None)
    else:
        store.set(f"{rank}", _GONE)  # a rank 0 that comes after all need not wait for this one, nor measure with it
    kept = write_own(mine, path, world_size=world)
    return Written(kept, (f"rank 0 did not take this rank's spans: they are in {kept}",))


def _measure(world: int, timeout_s: float) -> list[Clock]:
    """All ranks' clocks; they were all here a moment ago. The default group would wait as long as it is told to."""
    group = new_group(range(world), timeout=timedelta(seconds=timeout_s), backend="gloo")
    try:
        return measure(group)
    finally:
        dist.destroy_process_group(group)


def _get(store: Store, key: str, until: float) -> bytes | None:
    """A value as soon as it is there. Not by the store's own wait: it keeps other threads from the store."""
    while not store.check([key]):
        if time.monotonic() >= until:
            return None
        time.sleep(_LOOK_S)
    value: bytes = store.get(key)
    return value


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
