"""Reads PyTorch's flight-recorder dumps: the last collectives of each rank, from pickle or JSON, one file per rank.

torch writes them when a collective times out (`TORCH_FR_DUMP_TEMP_FILE`), and `_dump_fr_trace()` at any time. A dump
does not name its rank: the file name does, as in `comm_lib_trace_rank_3`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.files import open_regular, parse_json, reason
from syncline.trace.formats import plain_pickle
from syncline.trace.formats.trace_file import rank_in_name, text, whole

MOST_BYTES = 256 << 20
"""The largest dump that is read: about 250,000 calls with their stacks. torch keeps 2,000 by default."""

_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_JSON = re.compile(rb'\s*\{\s*"(?:comm_lib_version|nccl_version|entries|host_name|nccl_comm_state|pg_config)"')
_LAST_NUMBER = re.compile(r"(\d{1,6})(?:\.[a-z]+)*$", re.ASCII)
_RANKS = re.compile(r"\[?[\d, ]*\]?", re.ASCII)
_LIBRARY = re.compile(r"(^|/)torch/|/lib/python[\d.]+/(?!(site|dist)-packages)|^<frozen")
_MOST_FRAMES, _MOST_DIMENSIONS, _MOST_RANKS = 100, 16, 1_000_000


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of Python code on the stack of a call."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        """As sentences show it: `train.py:42 (step)`."""
        return f"{Path(self.file).name}:{self.line} ({self.name})"


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, send or receive that a rank called."""

    rank: int
    group: str
    """The name of its process group on this rank, and a number as a rule."""
    sequence: int
    """Its number among the group's collectives, or its sends and receives; parts of a coalesced call share one."""
    op: str
    """Such as `all_reduce`; a send or receive with its two ranks in the group: `send 0->1`."""
    created: int
    """When the rank called it: nanoseconds since the epoch on the rank's own clock."""
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    started: bool = False
    """Whether the GPU was seen to start it; unknown, and False, with Gloo."""
    done: bool = False
    p2p: bool = False
    order: int = 0
    """Its place among all calls of the rank."""
    frames: tuple[Frame, ...] = ()

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """The innermost three frames outside torch and Python's library: where the user's code makes the call."""
        own = [frame for frame in self.frames if not _LIBRARY.search(frame.file)]
        return tuple((own or list(self.frames))[:3])

    @property
    def elements(self) -> int:
        """The number of elements in its input, or in its output where it has no input."""
        return sum(map(math.prod, self.inputs)) or sum(map(math.prod, self.outputs))


@dataclass(frozen=True)
class Dump:
    """The calls of one rank, oldest first, and the ranks of the process groups that it knows."""

    rank: int
    path: Path
    calls: tuple[Call, ...]
    backend: str
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By group: the global ranks in it; Gloo does not record them."""
    descriptions: Mapping[str, str] = field(default_factory=dict)
    full: bool = False
    """Whether older calls were overwritten."""


@dataclass(frozen=True)
class Dumps:
    """The dumps of a job, by rank; `unreadable` are ranks whose file could not be read, with a note that says why."""

    by_rank: Mapping[int, Dump]
    unreadable: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def dump_files(path: Path) -> list[Path]:
    """The flight-recorder dumps among the files of a folder, or the file itself; empty where there are none."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file() and _looks_like_dump(file))
    return [path] if path.is_file() and _looks_like_dump(path) else []


def read_dumps(paths: Sequence[Path]) -> Dumps:
    """Read dumps of several ranks. A file that cannot be read is named in a note; `UsageError` if none is left."""
    found: dict[int, Dump] = {}
    unreadable, notes = [], []
    for path in paths:
        rank = _rank_of(path)
        if rank is None and len(paths) > 1:
            raise UsageError(f"{path} does not say its rank: end the file name with it, as in comm_lib_trace_rank_3")
        rank = rank or 0
        if rank in found:
            raise UsageError(f"{found[rank].path} and {path} are both dumps of rank {rank}: keep one of them")
        try:
            found[rank] = read_dump(path, rank=rank)
        except UsageError as error:
            if len(paths) == 1:
                raise
            unreadable.append(rank)
            notes.append(f"left out: {error}")
    if not found:
        raise UsageError(f"none of {len(paths)} flight-recorder dumps can be read; {notes[0]}")
    return Dumps(dict(sorted(found.items())), tuple(sorted(unreadable)), tuple(notes))


def read_dump(path: Path, *, rank: int) -> Dump:
    """Read the dump of one rank; `UsageError` says what is wrong with the file."""
    try:
        with open_regular(path) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES >> 20} MiB: record fewer calls with TORCH_FR_BUFFER_SIZE")
    try:
        content = plain_pickle.loads(data) if _PICKLE.match(data) else parse_json(data.decode())
    except ValueError as error:
        raise UsageError(f"{path} is not a flight-recorder dump: {error}; record it again") from None
    entries = content.get("entries", []) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"{path} is not a flight-recorder dump: it has no list of entries; record it again")
    backends, full = set(), False
    calls: list[Call] = []
    for place, entry in enumerate(entries):
        backend, call = _call(entry, rank)
        if call is None:
            raise UsageError(f"{path} is damaged: entry {place} is not a call; record it again")
        backends.add(backend)
        calls.append(call)
        full = full or (place == 0 and call.order > 0)
    calls = _with_coalesced_states(sorted(calls, key=lambda call: call.order))
    members, descriptions = _groups(content.get("pg_config"), entries)
    return Dump(rank, path, tuple(calls), "+".join(sorted(backends)), members, descriptions, full)


def _looks_like_dump(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            head = file.read(256)
    except OSError:
        return False
    return bool(_PICKLE.match(head) or _JSON.match(head))


def _rank_of(path: Path) -> int | None:
    found = rank_in_name(path)
    if found is None and (last := _LAST_NUMBER.search(path.name)):
        return int(last[1])
    return found


def _call(entry: Any, rank: int) -> tuple[str, Call | None]:
    """The backend and the call of an entry; None for the call if the entry is not one."""
    if not isinstance(entry, dict):
        return "", None
    backend, _, op = text(entry.get("profiling_name")).partition(":")
    # `seq_id` is its name in dumps of torch 2.3.
    sequence = whole(entry.get("collective_seq_id", entry.get("seq_id")))
    group, created = entry.get("process_group"), whole(entry.get("time_created_ns"))
    if not op or sequence < 0 or created < 0 or not (isinstance(group, list | tuple) and group):
        return backend, None
    p2p = entry.get("is_p2p") is True or op.startswith(("send ", "recv "))
    state = entry.get("state")
    done = state == "completed" or (backend == "gloo" and entry.get("retired") is True)
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or ()
    call = Call(
        rank=rank,
        group=text(group[0]),
        sequence=whole(entry.get("p2p_seq_id"), sequence) if p2p else sequence,
        op=op,
        created=created,
        inputs=_sizes(entry.get("input_sizes")),
        outputs=_sizes(entry.get("output_sizes")),
        dtypes=tuple(text(one) for one in dtypes) if isinstance(dtypes, list | tuple) else (),
        started=state in ("started", "completed"),
        done=done,
        p2p=p2p,
        order=whole(entry.get("record_id"), 0),
        frames=_frames(entry.get("frames")),
    )
    return backend, call


def _with_coalesced_states(calls: Sequence[Call]) -> list[Call]:
    """The calls, with the state of a coalesced call in its parts too: NCCL records it in an entry at the end only."""
    known = list(calls)
    parts: dict[tuple[str, bool, int], list[int]] = defaultdict(list)
    for at, call in enumerate(calls):
        mine = parts[call.group, call.p2p, call.sequence]
        if call.op == "coalesced" or call.op.endswith("_coalesced"):
            for part in mine:
                known[part] = replace(known[part], started=call.started, done=call.done)
        mine.append(at)
    return known


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    shapes = value if isinstance(value, list | tuple) else ()
    shapes = [shape[:_MOST_DIMENSIONS] for shape in shapes if isinstance(shape, list | tuple)]
    return tuple(tuple(whole(length, 0) for length in shape) for shape in shapes)


def _frames(value: Any) -> tuple[Frame, ...]:
    rows = value[:_MOST_FRAMES] if isinstance(value, list | tuple) else ()
    return tuple(
        Frame(text(row.get("filename")), whole(row.get("line"), 0), text(row.get("name")))
        for row in rows
        if isinstance(row, dict)
    )


def _groups(config: Any, entries: Sequence[Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The ranks and the descriptions of the groups that a dump knows, by name."""
    members: dict[str, tuple[int, ...]] = {}
    descriptions: dict[str, str] = {}
    for name, row in config.items() if isinstance(config, dict) else ():
        ranks = row.get("ranks") if isinstance(row, dict) else None
        if isinstance(ranks, str) and _RANKS.fullmatch(ranks):
            ranks = [int(number) for number in re.findall(r"\d{1,6}", ranks)]
        if isinstance(ranks, list | tuple) and ranks and all(0 <= whole(rank) < _MOST_RANKS for rank in ranks):
            members[text(name)] = tuple(sorted(set(ranks)))
            descriptions[text(name)] = text(row.get("desc"))
    for entry in entries:
        group = entry["process_group"]
        if len(group) > 1 and text(group[1]) not in ("", "undefined"):
            descriptions.setdefault(text(group[0]), text(group[1]))
    return members, descriptions
