"""Gathering all ranks' spans on rank 0 at the end of a recording, through the store of the process group.

Every wait has a time limit, and only JSON is sent. Each rank puts its spans into the store, and rank 0 takes what
arrives in time, also from a rank that has left. A rank whose spans were not taken writes a file of its own.
"""

import contextlib
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from syncline._compat.groups import PrefixStore, Store, default_store, new_group
from syncline.files import reason
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.merge.clocks import Clock, measure_clocks
from syncline.trace.merge.merge_ranks import Part, merge
from syncline.trace.merge.notes import combined
from syncline.trace.merge.rank_file import missing_note, rank_file_name, write_rank_file
from syncline.trace.record.crash_watch import announce_crash
from syncline.trace.span import Span

_CHUNK_BYTES = 1 << 20  # a store refuses messages of many megabytes
_POLL_S = 0.02
_WRITTEN, _FAILED = "written", "failed"
_STORE_ERRORS = (RuntimeError, ValueError, OSError)  # of a store or a peer that is gone; DistError is a RuntimeError


@dataclass(frozen=True)
class RankRecording:
    """What one rank contributes to the trace."""

    part: Part
    error: str = ""
    """The error that ended the loop, in one line."""
    notes: tuple[str, ...] = ()
    """What this rank could not record."""
    peer_failed: bool = False
    """Whether it is sent because the loop of another rank has failed, while this rank's is blocked."""

    @property
    def failed(self) -> bool:
        """Whether ranks are missing or leave soon, so that nobody can wait for all of them."""
        return bool(self.error) or self.peer_failed

    def to_bytes(self) -> bytes:
        """As compressed JSON. The clock is measured later, by all ranks together."""
        part = {field.name: getattr(self.part, field.name) for field in fields(self.part) if field.name != "clock"}
        part["spans"] = [span.to_row() for span in self.part.spans]
        return gzip.compress(json.dumps([part, self.error, self.notes]).encode(), compresslevel=3)

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankRecording":
        """What `to_bytes` wrote."""
        part, error, notes = json.loads(gzip.decompress(data))
        part["spans"] = [Span.from_row(part["rank"], row) for row in part["spans"]]
        return cls(Part(**part), error, tuple(notes))


@dataclass(frozen=True)
class WrittenTrace:
    """The file that a rank has written: the trace on rank 0, its own spans where that failed, or none."""

    path: Path | None
    notes: tuple[str, ...] = ()


def write_trace(
    recordings: Sequence[RankRecording], path: Path, *, world_size: int, metadata: dict[str, Any]
) -> WrittenTrace:
    """Merge the recordings of ranks into one trace file; its notes name the ranks that are missing."""
    merged = merge([recording.part for recording in recordings])
    present = {recording.part.rank for recording in recordings}
    missing = [rank for rank in range(world_size) if rank not in present]
    notes = [f"rank {one.part.rank} ended with an error: {one.error}" for one in recordings if one.error]
    notes += [f"rank {one.part.rank}: {text}" for one in recordings for text in one.notes]
    notes = combined([*notes, *merged.notes])
    if len({recording.part.host for recording in recordings}) > 1 and merged.clock_error_ns is not None:
        notes.append(
            "the clocks of the hosts were measured once, at the end of the recording: earlier drift is not corrected"
        )
    metadata = {**metadata, "world_size": world_size, "notes": notes, **merged.metadata}
    if missing:
        metadata["missing"] = missing
        for recording in recordings:  # `load` merges these with the files that the missing ranks may still write
            keep_rank_file(recording.part, path, world_size=world_size)

    def write(target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(replace(merged, metadata=metadata), target)

    written, more_notes = _write_somewhere(write, path)
    return WrittenTrace(written, (*([missing_note(missing)] if missing else []), *notes, *more_notes))


def keep_rank_file(part: Part, path: Path, *, world_size: int) -> Path:
    """Write one rank's spans into the folder of the trace `path`."""
    target = path.parent / rank_file_name(part.rank)
    return _write_somewhere(lambda file: write_rank_file(part, file.parent, world_size=world_size), target)[0]


def _write_somewhere(write: Callable[[Path], object], path: Path) -> tuple[Path, tuple[str, ...]]:
    """`write` to the path, or else to a folder of temporary files, so that nothing is lost; with a note about that."""
    try:
        write(path)
        return path, ()
    except OSError as error:
        other = Path(tempfile.mkdtemp(prefix="syncline-trace-")) / path.name
        write(other)
        return other, (f"{path} could not be written ({reason(error)}): it is in {other}",)


def gather_trace(
    recording: RankRecording, path: Path, *, number: int, timeout_s: float, metadata: dict[str, Any]
) -> WrittenTrace:
    """Write the trace of all ranks to `path` on rank 0, after at most `timeout_s` seconds. Every rank calls this.

    `number` is that of the recording (`recording_store`).
    """
    world = dist.get_world_size()
    try:
        store = recording_store(number)
        if recording.error:
            announce_crash(store)
        if recording.part.rank == 0:
            return receive(recording, store, path, world=world, timeout_s=timeout_s, metadata=metadata)
        return send(recording, store, path, world=world, timeout_s=timeout_s)
    except _STORE_ERRORS as error:
        kept = keep_rank_file(recording.part, path, world_size=world)
        note = f"the ranks' spans could not be gathered ({first_line(error)}): this rank's are in {kept}"
        return WrittenTrace(kept, (note,))


def recording_store(number: int) -> Store:
    """The part of the process group's store for one recording.

    Each process counts its recordings: the n-th recordings of all ranks belong together.
    """
    return PrefixStore(f"syncline/trace/{number}", default_store())


def receive(
    mine: RankRecording, store: Store, path: Path, *, world: int, timeout_s: float, metadata: dict[str, Any]
) -> WrittenTrace:
    """Rank 0's side: take the other ranks' recordings out of the store and write the trace."""
    until = time.monotonic() + timeout_s
    found = {rank: _poll(store, f"{rank}", until) for rank in range(1, world)}
    heads = {rank: json.loads(head) for rank, head in found.items() if head is not None}
    hosts = {mine.part.host, *(head["host"] for head in heads.values())}
    complete = len(heads) == world - 1 and not mine.failed and not any(head["failed"] for head in heads.values())
    measures = complete and len(hosts) > 1
    store.set("decided", json.dumps({"ranks": [0, *heads], "measures": measures}))
    clocks: Sequence[Clock | None] = [None] * world
    if measures:
        try:
            clocks = _measure(world, timeout_s)
        except _STORE_ERRORS as error:
            note = f"the clocks of the hosts could not be measured ({first_line(error)})"
            mine = replace(mine, notes=(*mine.notes, note))
    recordings = [mine]
    for rank, head in heads.items():
        keys = [f"{rank}/{index}" for index in range(head["chunks"])]
        recordings.append(RankRecording.from_bytes(b"".join(store.get(key) for key in keys)))
        for key in keys:
            store.delete_key(key)
    recordings = [replace(one, part=replace(one.part, clock=clocks[one.part.rank])) for one in recordings]
    try:
        written = write_trace(recordings, path, world_size=world, metadata=metadata)
    except Exception:
        store.set("done", _FAILED)
        raise
    store.set("done", _WRITTEN)
    return written


def send(mine: RankRecording, store: Store, path: Path, *, world: int, timeout_s: float) -> WrittenTrace:
    """The other ranks' side: put the recording into the store, and wait until rank 0 has written the trace."""
    rank, data = mine.part.rank, mine.to_bytes()
    chunks: list[Any] = [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
    for index, chunk in enumerate(chunks):
        store.set(f"{rank}/{index}", chunk)
    head = {"host": mine.part.host, "chunks": len(chunks), "failed": mine.failed}
    store.set(f"{rank}", json.dumps(head))
    # Rank 0 may arrive just before its own time is up. After an error the user should not wait long to see it.
    until = time.monotonic() + timeout_s * (1 if mine.failed else 2)
    decided = _poll(store, "decided", until)
    if decided is not None:
        decision = json.loads(decided)
        if rank in decision["ranks"]:
            if decision["measures"]:
                with contextlib.suppress(*_STORE_ERRORS):  # rank 0 goes on without clocks, and notes it
                    _measure(world, timeout_s)
                until = max(until, time.monotonic() + timeout_s)
            if _poll(store, "done", until) == _WRITTEN.encode():
                return WrittenTrace(None)
    else:
        # A rank 0 that arrives later takes the spans, but this rank cannot measure clocks with it any more.
        store.set(f"{rank}", json.dumps(head | {"failed": True}))
    kept = keep_rank_file(mine.part, path, world_size=world)
    return WrittenTrace(kept, (f"rank 0 did not take this rank's spans: they are in {kept}",))


def _measure(world: int, timeout_s: float) -> list[Clock]:
    """All ranks' clocks, in a group with our timeout: the default group would wait as long as its own."""
    group = new_group(range(world), timeout=timedelta(seconds=timeout_s), backend="gloo")
    try:
        return measure_clocks(group)
    finally:
        dist.destroy_process_group(group)


def _poll(store: Store, key: str, until: float) -> bytes | None:
    """The value of a key as soon as it is set; None after `until`. The store's own wait blocks other threads' calls."""
    while not store.check([key]):
        if time.monotonic() >= until:
            return None
        time.sleep(_POLL_S)
    value: bytes = store.get(key)
    return value


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
