"""Loads a trace from a run folder, a trace file of any known format, or a folder of such files.

A new format: write `<name>_read.py` with `KIND`, `recognises` and `read`, and add a line to `READERS`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from syncline.errors import UsageError, unknown
from syncline.trace.formats import chrome_read, horovod_read, profiler_read
from syncline.trace.formats.align_rank_files import align
from syncline.trace.formats.json_stream import Limits
from syncline.trace.formats.trace_file import RankTrace, TraceFile, rank_in_name
from syncline.trace.gpu_activity import GpuActivity
from syncline.trace.merge.merge_ranks import WAITS_UNKNOWN, Trace
from syncline.trace.merge.notes import combined
from syncline.trace.merge.rank_file import has_rank_files, merge_folder, with_late_ranks
from syncline.trace.span import Span

TRACE = "trace.json.gz"
"""The file name of the trace of all ranks in a strategy's folder."""

READERS = (profiler_read, horovod_read, chrome_read)
"""The modules of all formats that can be read.

`recognises(file, event)` says whether the file (its header) and one of its events show that it has this format;
`read(file)` gives the spans of each rank that the file tells of.
"""

_LOOK = 20_000  # events after which a file of an unknown format is given up
_SHOWN = 20
_NO_TRACES = frozenset({"config.json", "results.json", "versions.json"})  # other files of a run folder


def load(source: str | Path | Sequence[str | Path], *, run: str | None = None, limits: Limits | None = None) -> Trace:
    """The trace in a run folder, a strategy's folder, a trace file, a folder of ranks' files, or several such files.

    Files of torch.profiler and Horovod timelines are read too. `run` names one strategy of a run folder with several.
    `limits` bounds what is read from one file.
    """
    found = _load(source, run, limits)
    return replace(found, notes=tuple(combined(found.notes)))


def _load(source: str | Path | Sequence[str | Path], run: str | None, limits: Limits | None) -> Trace:
    if not isinstance(source, str | Path):
        return _foreign(Path(source[0]).parent if source else Path(), import_files(source, limits=limits))
    path = Path(source)
    if path.is_file():
        if run is not None:
            raise UsageError(f"{path} is one trace: --run {run} needs the run folder that it is in")
        return _load_file(path, limits)
    if not path.is_dir():
        raise UsageError(f"there is no '{path}': name a run folder, or a {TRACE}")
    if run is None and (path / TRACE).is_file():
        return _load_file(path / TRACE, limits)
    if run is None and has_rank_files(path):
        return merge_folder(path)
    found = runs(path)
    if run is not None:
        chosen = [folder for folder in found if folder.name == run]
        if not chosen:
            raise unknown("run", run, [folder.name for folder in found])
        return _load_file(chosen[0] / TRACE, limits)
    if len(found) > 1:
        raise UsageError(f"{path} holds the traces of {len(found)} runs: name one, such as {found[0]}")
    if found:
        return _load_file(found[0] / TRACE, limits)
    files = _paths(path)
    return _load_file(files[0], limits) if len(files) == 1 else _foreign(path, import_files(files, limits=limits))


def runs(path: Path) -> list[Path]:
    """The folders of a run folder's strategies that have a trace."""
    return sorted(file.parent for file in path.glob(f"runs/*/{TRACE}"))


def _load_file(path: Path, limits: Limits | None) -> Trace:
    if _reader(path, limits or Limits()) is not chrome_read:
        return _foreign(path, import_files(path, limits=limits))
    found = chrome_read.read_chrome_trace(path, limits=limits)
    written = found.metadata.get("notes")
    earlier = [text for text in written if isinstance(text, str)] if isinstance(written, list) else []
    found = with_late_ranks(replace(found, notes=(*earlier, *found.notes)))
    if any(phrase in text for text in found.notes for phrase in WAITS_UNKNOWN):
        # The clocks were not measured, as the trace says.
        return replace(found, metadata={**found.metadata, "aligned": False})
    return _with_note(found)


def _foreign(path: Path, found: "Imported") -> Trace:
    """A trace of another tool; waits are split off where the ranks' clocks agree."""
    metadata: dict[str, Any] = {"imported": found.kind, "world_size": max(found.world, len(found.spans))}
    if not found.aligned:
        metadata["aligned"] = False
    if any(found.hosts.values()):
        metadata["nodes"] = {str(rank): host for rank, host in found.hosts.items()}
    if found.gpu:
        metadata["gpu"] = {str(rank): activity.as_json() for rank, activity in found.gpu.items()}
    if found.operators:
        metadata["operators"] = {str(rank): rows for rank, rows in found.operators.items()}
    spans = [span for mine in found.spans.values() for span in mine]
    split = found.aligned and len(found.spans) > 1
    return _with_note(Trace.of(spans, metadata=metadata, notes=found.notes, path=path, split=split))


def _with_note(trace: Trace) -> Trace:
    """The trace with a note if waits for a late rank are unknown."""
    why = trace.waits_unknown
    note = f"{why}: waits for a late rank {WAITS_UNKNOWN[0]}"
    return replace(trace, notes=(*trace.notes, note)) if why else trace


@dataclass(frozen=True)
class Imported:
    """Trace files as read: their format, the spans by rank, and notes about missing or odd content."""

    kind: str
    spans: dict[int, list[Span]]
    notes: tuple[str, ...] = ()
    aligned: bool = True
    """Whether all ranks' times are on one clock."""
    world: int = 0
    """The job's number of ranks according to its files; 0 where they do not say."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """By rank: the name of its host, empty where its file does not say."""
    gpu: Mapping[int, GpuActivity] = field(default_factory=dict)
    """By rank: what its GPU waited for, where the files show GPUs."""
    operators: Mapping[int, list[list[Any]]] = field(default_factory=dict)
    """By rank: rows of step, operator and nanoseconds of the host."""


def import_files(source: str | Path | Iterable[str | Path], *, limits: Limits | None = None) -> Imported:
    """Read one trace file, several files, or all files of a folder (one per rank), plain or gzip.

    A file that cannot be read is named in `notes`, and the others are loaded. `UsageError` if no file is left, and for
    a single file. The ranks of several files are aligned to the first one's clock.
    """
    paths = _paths(source)
    traces: list[RankTrace] = []
    notes: list[str] = []
    kinds: dict[str, Path] = {}
    for path in paths:
        try:
            reader = _reader(path, limits or Limits())
            read = reader.read(TraceFile(path, limits or Limits()))
            found = [trace for trace in read if trace.spans]
            if not found:
                why = "; ".join(note for trace in read for note in trace.notes)
                raise UsageError(
                    f"{path} holds nothing that can be analysed: {why or 'profile at least one whole training step'}"
                )
        except UsageError as error:
            if len(paths) == 1:
                raise
            notes.append(f"left out: {error}")
            continue
        kinds.setdefault(reader.KIND, path)
        traces += found
    if not traces:
        raise UsageError(f"none of {len(paths)} files is a trace that can be read; {notes[0]}")
    if len(kinds) > 1:
        both = " and ".join(f"{path} ({kind})" for kind, path in list(kinds.items())[:2])
        raise UsageError(f"{both} are traces of two formats: give files of one format")
    (kind,) = kinds
    return _combine(kind, traces, notes)


def _paths(source: str | Path | Iterable[str | Path]) -> list[Path]:
    given = [Path(source)] if isinstance(source, str | Path) else [Path(one) for one in source]
    if not given:
        raise UsageError("no trace was given: name a file, several, or a folder")
    if len(given) == 1 and given[0].is_dir():
        files = (file for file in given[0].iterdir() if file.name not in _NO_TRACES)
        if found := sorted(file for file in files if file.name.endswith((".json", ".json.gz"))):
            return found
        raise UsageError(
            f"{given[0]} holds no trace: name a run folder of syncline train or compare, or a folder with .json or"
            " .json.gz files of another tool"
        )
    # A pipe or a device could block for ever.
    if odd := next((path for path in given if not path.is_file()), None):
        raise UsageError(f"{odd} is not a file: give trace files, or one folder of them")
    return given


def _reader(path: Path, limits: Limits) -> ModuleType:
    """The module that reads this file."""
    file = TraceFile(path, limits)
    for event in islice(file.events(), _LOOK):
        for reader in READERS:
            if reader.recognises(file, event):
                return reader
    known = ", ".join(reader.KIND for reader in READERS)
    raise UsageError(f"{path} is not a trace of {known}: none of its events is known")


def _combine(kind: str, traces: list[RankTrace], notes: list[str]) -> Imported:
    """One trace from the files' ranks."""
    many = len({trace.path for trace in traces}) > 1
    _assign_ranks(traces, notes)
    notes += combined(f"rank {one.rank}: {note}" if many else note for one in traces for note in one.notes)
    by_rank = _unique(sorted(traces, key=lambda trace: trace.rank), notes)
    aligned = True
    if many:
        more, aligned = align(by_rank)
        notes += more
    world = max(trace.world for trace in by_rank)
    lost = sorted(set(range(min(world, 1 << 20))) - {trace.rank for trace in by_rank})
    if lost:
        names = ", ".join(str(rank) for rank in lost[:_SHOWN]) + (", ..." if len(lost) > _SHOWN else "")
        notes.append(f"of {world:,} ranks, {len(lost):,} {'has' if len(lost) == 1 else 'have'} no trace here: {names}")
    spans = {trace.rank: sorted(trace.spans, key=lambda span: (span.start, -span.end)) for trace in by_rank}
    hosts = {trace.rank: trace.host for trace in by_rank}
    gpu = {trace.rank: trace.gpu for trace in by_rank if trace.gpu is not None}
    operators = {trace.rank: trace.operators for trace in by_rank if trace.operators}
    return Imported(kind, spans, tuple(notes), aligned, world, hosts=hosts, gpu=gpu, operators=operators)


def _assign_ranks(traces: Sequence[RankTrace], notes: list[str]) -> None:
    """Give a rank to the files that do not say theirs: from their names, else in the order of process ids."""
    unknown_rank = [trace for trace in traces if trace.rank < 0]
    taken = {trace.rank for trace in traces}
    for trace in sorted(unknown_rank, key=lambda trace: (len(trace.pid), trace.pid, trace.path.name)):
        found = rank_in_name(trace.path)
        trace.rank = next(i for i in range(len(traces) + 1) if i not in taken) if found is None else found
        taken.add(trace.rank)
        trace.spans = [replace(span, rank=trace.rank) for span in trace.spans]
        if found is None and len(traces) > 1:
            notes.append(f"{trace.path.name} does not say its rank: taken as {trace.rank}, by the order of processes")


def _unique(traces: Sequence[RankTrace], notes: list[str]) -> list[RankTrace]:
    """One trace per rank: a profiler that ran several times leaves several files, each with its own steps."""
    result: dict[int, RankTrace] = {}
    for trace in traces:
        first = result.setdefault(trace.rank, trace)
        if first is trace:
            continue
        if {span.step for span in first.spans} & {span.step for span in trace.spans}:
            notes.append(f"left out: {trace.path.name} has steps of rank {trace.rank} that {first.path.name} has too")
        else:
            first.spans = first.spans + trace.spans
            first.operators = first.operators + trace.operators
            if trace.gpu is not None:
                first.gpu = trace.gpu if first.gpu is None else first.gpu.with_more(trace.gpu)
    return list(result.values())
