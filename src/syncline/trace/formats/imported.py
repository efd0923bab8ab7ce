"""Import: traces that others wrote (torch.profiler, Horovod), or we, as spans of ranks."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.trace.formats import chrome_read as reread
from syncline.trace.formats import horovod_read as horovod
from syncline.trace.formats import profiler as kineto
from syncline.trace.formats.align import align, match
from syncline.trace.formats.json_stream import Limits
from syncline.trace.formats.trace_file import RankTrace, TraceFile, fields
from syncline.trace.span import LANES, STEP, Span

OURS = "syncline"
"""The name of the kind that `write_chrome_trace` writes."""

_LOOK = 20_000  # events after which a file that nobody recognises is given up
_RANK = re.compile(r"(?:rank|worker|^r)[-_. ]?(\d{1,6})", re.IGNORECASE | re.ASCII)
_SHOWN = 20


@dataclass(frozen=True)
class Imported:
    """A trace as read: the kind of its files, spans by rank, and what was missing or odd, in sentences."""

    kind: str
    spans: dict[int, list[Span]]
    notes: tuple[str, ...] = ()
    aligned: bool = True
    """Whether all ranks' times are on one clock."""
    world: int = 0
    """How many ranks the job had, as its files say; 0 where they do not."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that there are spans of."""
        return tuple(self.spans)


def load(source: str | Path | Iterable[str | Path], *, limits: Limits | None = None) -> Imported:
    """Read a trace file, several files, or all of a folder (a file a rank), plain or gzip.

    A file that cannot be read is named in `notes` and the others are loaded; where none is left, and for a single file,
    it raises `UsageError`. Ranks of several files are set to the first one's clock.
    """
    paths = _paths(source)
    traces: list[RankTrace] = []
    notes: list[str] = []
    kinds: dict[str, Path] = {}
    for path in paths:
        try:
            kind, found = _read(path, limits or Limits())
        except UsageError as error:
            if len(paths) == 1:
                raise
            notes.append(f"left out: {error}")
            continue
        kinds.setdefault(kind, path)
        traces += found
    if not traces:
        raise UsageError(f"none of {len(paths)} files is a trace that can be read; {notes[0]}")
    if len(kinds) > 1:
        both = " and ".join(f"{path} ({kind})" for kind, path in list(kinds.items())[:2])
        raise UsageError(f"{both} are traces of two kinds: give those of one")
    (kind,) = kinds
    return _together(kind, traces, notes)


def kind_of(path: Path, *, limits: Limits | None = None) -> str:
    """What wrote a trace file: torch.profiler, Horovod or we; `UsageError` for any other file."""
    if not path.is_file():
        raise UsageError(f"{path} is no file: give a trace file")
    return _kind(path, limits or Limits())[0]


def _paths(source: str | Path | Iterable[str | Path]) -> list[Path]:
    given = [Path(source)] if isinstance(source, str | Path) else [Path(one) for one in source]
    if not given:
        raise UsageError("no trace was given: name a file, several, or a folder")
    if len(given) == 1 and given[0].is_dir():
        found = sorted(path for path in given[0].iterdir() if path.name.endswith((".json", ".json.gz")))
        if not found:
            raise UsageError(f"{given[0]} has no .json or .json.gz file: give the folder that holds the trace files")
        return found
    # A pipe or a device could block for ever.
    if odd := next((path for path in given if not path.is_file()), None):
        raise UsageError(f"{odd} is no file: give trace files, or one folder of them")
    return given


def _read(path: Path, limits: Limits) -> tuple[str, list[RankTrace]]:
    kind, reader = _kind(path, limits)
    found = [trace for trace in reader(TraceFile(path, limits)) if trace.spans]
    if not found:
        raise UsageError(f"{path} holds nothing that can be analysed: profile at least one whole training step")
    return kind, found


def _kind(path: Path, limits: Limits) -> tuple[str, Callable[[TraceFile], list[RankTrace]]]:
    file = TraceFile(path, limits)
    for number, event in enumerate(file.events()):
        for kind, (recognises, reader) in _READERS.items():
            if recognises(file, event):
                return kind, reader
        if number == _LOOK:
            break
    raise UsageError(f"{path} is no trace of {', '.join(_READERS)}: none of its events is known")


def _together(kind: str, traces: list[RankTrace], notes: list[str]) -> Imported:
    many = len({trace.path for trace in traces}) > 1
    for trace in traces:
        notes += [f"{trace.path.name}: {note}" if many else note for note in trace.notes]
    _rank(traces, notes)
    by_rank = _unique(sorted(traces, key=lambda trace: trace.rank), notes)
    aligned = True
    if many:
        match(by_rank)
        told, aligned = align(by_rank)
        notes += told
    world = max(trace.world for trace in by_rank)
    lost = sorted(set(range(min(world, 1 << 20))) - {trace.rank for trace in by_rank})
    if lost:
        names = ", ".join(str(rank) for rank in lost[:_SHOWN]) + (", ..." if len(lost) > _SHOWN else "")
        notes.append(f"of {world} ranks, {len(lost)} have no trace here: {names}")
    spans = {trace.rank: sorted(trace.spans, key=lambda span: (span.start, -span.end)) for trace in by_rank}
    return Imported(kind, spans, tuple(notes), aligned, world)


def _rank(traces: list[RankTrace], notes: list[str]) -> None:
    """Give a rank to the files that do not say theirs: from their names, else in the order of processes."""
    unknown = [trace for trace in traces if trace.rank < 0]
    named = {id(trace): _RANK.search(trace.path.name) for trace in unknown}
    taken = {trace.rank for trace in traces}
    for trace in sorted(unknown, key=lambda trace: (len(trace.pid), trace.pid, trace.path.name)):
        found = named[id(trace)]
        trace.rank = int(found[1]) if found else next(i for i in range(len(traces) + 1) if i not in taken)
        taken.add(trace.rank)
        trace.spans = [replace(span, rank=trace.rank) for span in trace.spans]
        if not found and len(traces) > 1:
            notes.append(f"{trace.path.name} does not say its rank: taken as {trace.rank}, by the order of processes")


def _unique(traces: list[RankTrace], notes: list[str]) -> list[RankTrace]:
    """One trace a rank: a profiler that ran several times leaves several files, each with steps of its own."""
    result: dict[int, RankTrace] = {}
    for trace in traces:
        first = result.setdefault(trace.rank, trace)
        if first is trace:
            continue
        if {span.step for span in first.spans} & {span.step for span in trace.spans}:
            notes.append(f"left out: {trace.path.name} has steps of rank {trace.rank} that {first.path.name} has too")
        else:
            first.spans = first.spans + trace.spans
    return list(result.values())


def _is_ours(file: TraceFile, event: dict[str, Any]) -> bool:
    del file
    return event.get("ph") == "X" and event.get("cat") in (*LANES, STEP) and "unit" in fields(event)


def _read_ours(file: TraceFile) -> list[RankTrace]:
    found = reread.reread(file.path, limits=file.limits)
    ranks: dict[int, list[Span]] = {}
    for span in found.spans:
        ranks.setdefault(span.rank, []).append(span)
    notes = list(found.notes)
    return [RankTrace(file.path, rank, ranks[rank], notes if i == 0 else []) for i, rank in enumerate(sorted(ranks))]


_READERS: dict[str, tuple[Callable[[TraceFile, dict[str, Any]], bool], Callable[[TraceFile], list[RankTrace]]]] = {
    kineto.KIND: (kineto.recognises, kineto.read),
    horovod.KIND: (horovod.recognises, horovod.read),
    OURS: (_is_ours, _read_ours),
}
