"""Where a trace comes from: a run folder, a file of ours or of others, a folder of ranks' files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.errors import UsageError, unknown
from syncline.trace.analysis.late_rank_limits import waits_missing
from syncline.trace.analysis.partition import split_waits
from syncline.trace.formats.chrome_read import reread
from syncline.trace.formats.imported import OURS, Imported, kind_of, load
from syncline.trace.merge.rank_file import has_rank_files, merge_folder
from syncline.trace.span import Span

TRACE = "trace.json.gz"
"""The trace of all ranks in a strategy's folder."""

_TOLD = "are not told from transfers"
_NO_TRACES = frozenset({"config.json", "results.json", "versions.json"})  # what a run folder holds beside its runs


@dataclass(frozen=True)
class Source:
    """A trace that was found: its file or folder, its spans, what was written beside them, what is missing."""

    path: Path
    spans: list[Span]
    metadata: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.path if self.path.is_dir() else self.path.parent


def find(path: Path, *, run: str | None = None) -> Source:
    """The trace behind a run folder, a strategy's folder, a trace file, or a folder of ranks' files.

    Files of torch.profiler and Horovod timelines are read too. `run` names one of a run folder's several strategies.
    """
    if path.is_file():
        if run is not None:
            raise UsageError(f"{path} is one trace: --run {run} needs the run folder that it is in")
        return _open(path)
    if not path.is_dir():
        raise UsageError(f"there is no '{path}': name a run folder, or a {TRACE}")
    if run is None and (path / TRACE).is_file():
        return _open(path / TRACE)
    if run is None and has_rank_files(path):
        merged = merge_folder(path)
        return Source(path, merged.spans, {"clock_error_ns": merged.clock_error_ns}, merged.notes)
    found = runs(path)
    if run is not None:
        chosen = [folder for folder in found if folder.name == run]
        if not chosen:
            raise unknown("run", run, [folder.name for folder in found])
        return _open(chosen[0] / TRACE)
    if len(found) > 1:
        raise UsageError(f"{path} holds the traces of {len(found)} runs: name one, such as {found[0]}")
    return _open(found[0] / TRACE) if found else _folder(path)


def runs(path: Path) -> list[Path]:
    """The folders of a run folder's strategies that have a trace."""
    return sorted(file.parent for file in path.glob(f"runs/*/{TRACE}"))


def _folder(path: Path) -> Source:
    """Ranks' files that others wrote."""
    files = sorted(f for f in path.iterdir() if f.name.endswith((".json", ".json.gz")) and f.name not in _NO_TRACES)
    if not files:
        raise UsageError(f"{path} holds no trace: name a run folder of syncline train or compare, or traces of others")
    return _open(files[0]) if len(files) == 1 else _others(path, load(files))


def _open(path: Path) -> Source:
    return _read(path) if kind_of(path) == OURS else _others(path, load(path))


def _others(path: Path, found: Imported) -> Source:
    """A trace that others wrote: waits are cut out of its exchanges where its ranks' clocks agree."""
    spans = [span for rank in found.ranks for span in found.spans[rank]]
    if found.aligned and len(found.ranks) > 1:
        spans = split_waits(spans)
    about: dict[str, Any] = {"imported": found.kind, "world_size": max(found.world, len(found.ranks))}
    if not found.aligned:
        about["aligned"] = False
    return Source(path, spans, about, (*found.notes, *_untold(about, spans)))


def _untold(about: Mapping[str, Any], spans: Sequence[Span]) -> list[str]:
    """A note where waits for a late rank cannot be told."""
    why = waits_missing(about, len({span.rank for span in spans}))
    return [f"{why}: waits for a late rank {_TOLD}"] if why else []


def _read(path: Path) -> Source:
    again = reread(path)
    told = again.metadata.get("notes")
    earlier = [text for text in told if isinstance(text, str)] if isinstance(told, list) else []
    notes, about = (*earlier, *again.notes), again.metadata
    if any(_TOLD in text for text in notes):
        # Its clocks were not measured, as it says.
        return Source(path, again.spans, {**about, "aligned": False}, notes)
    return Source(path, again.spans, about, (*notes, *_untold(about, again.spans)))
