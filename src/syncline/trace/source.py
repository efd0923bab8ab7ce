"""Where a trace comes from: a run folder, a file of ours or of others, a folder of ranks' files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.trace.rankfile import has_parts, merge_folder
from syncline.trace.reread import reread
from syncline.trace.span import Span

TRACE = "trace.json.gz"
"""The trace of all ranks in a strategy's folder."""


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


def find(path: Path) -> Source:
    """The trace behind a run folder, a strategy's folder, a trace file or a folder of ranks' spans."""
    if path.is_file():
        return _read(path)
    if not path.is_dir():
        raise UsageError(f"there is no '{path}': name a run folder, or a {TRACE}")
    if (path / TRACE).is_file():
        return _read(path / TRACE)
    if has_parts(path):
        merged = merge_folder(path)
        return Source(path, merged.spans, {"clock_error_ns": merged.clock_error_ns}, merged.notes)
    found = sorted(file.parent for file in path.glob(f"runs/*/{TRACE}"))
    if not found:
        raise UsageError(f"{path} holds no trace: name a run folder of syncline train or compare")
    if len(found) > 1:
        raise UsageError(f"{path} holds the traces of {len(found)} runs: name one, such as {found[0]}")
    return _read(found[0] / TRACE)


def _read(path: Path) -> Source:
    again = reread(path)
    told = again.metadata.get("notes")
    earlier = [text for text in told if isinstance(text, str)] if isinstance(told, list) else []
    return Source(path, again.spans, again.metadata, (*earlier, *again.notes))
