"""Files with the spans of one rank, and their merge into one trace.

A file is compressed JSON lines: a head that describes the rank, then one row per span. A truncated file gives the spans
up to there.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from syncline.errors import UsageError
from syncline.files import open_regular, parse_json, reason, writing
from syncline.trace.merge.clocks import Clock
from syncline.trace.merge.merge_ranks import Part, Trace, merge
from syncline.trace.merge.metadata import MAX_RANKS
from syncline.trace.merge.notes import named_ranks
from syncline.trace.span import MAX_TIME_NS, Span
from syncline.wording import plural

FORMAT = "syncline spans 1"
_NAME = re.compile(r"rank(\d+)\.spans\.jsonl\.gz")
_MAX_LINE_BYTES, _MAX_FILE_BYTES, _MAX_SPANS = 1 << 16, 1 << 28, 1_000_000
_SLACK_S = 60.0  # between the end of a recording and the writing of its files
_MAX_NAMED = 16  # missing ranks that are named one by one


@dataclass(frozen=True)
class RankFile:
    """The content of a file; `problem` says why it is incomplete, in words that follow the file's name."""

    part: Part
    world_size: int
    problem: str = ""


def rank_file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank{rank}.spans.jsonl.gz"


def write_rank_file(part: Part, folder: Path, *, world_size: int) -> Path:
    """Write one rank's spans into a folder; returns the file. `merge_folder` merges such files."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / rank_file_name(part.rank)
    head = {
        "format": FORMAT,
        "rank": part.rank,
        "world_size": world_size,
        "host": part.host,
        "node": part.node,
        "clock": asdict(part.clock) if part.clock else None,
        "spans": len(part.spans),
    }
    temporary = path.with_name(path.name + ".part")
    try:
        with writing(path), gzip.open(temporary, "wt", encoding="utf-8", compresslevel=6) as file:
            file.write(json.dumps(head) + "\n")
            for span in part.spans:
                file.write(json.dumps(span.to_row()) + "\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def read_rank_file(path: Path) -> RankFile:
    """Read one rank's spans; `ValueError` where not even the head can be read."""
    with open_regular(path) as raw:
        lines = _Lines()
        texts = lines.read(raw)
        head = _head(next(texts, None), lines.problem)
        spans: list[Span] = []
        problem = ""
        for text in texts:
            try:
                spans.append(Span.from_untrusted_row(head["rank"], parse_json(text)))
            except ValueError as error:
                problem = f"is broken in line {len(spans) + 2} ({error}), after {plural(len(spans), 'span')}"
                break
            if len(spans) == _MAX_SPANS and len(spans) < head["spans"]:
                problem = f"has more than {_MAX_SPANS:,} spans: the rest is left out"
                break
    if not problem and (lines.problem or len(spans) < head["spans"]):
        problem = f"{lines.problem or 'is cut off'}: {len(spans):,} of {plural(head['spans'], 'span')} can be read"
    clock = Clock(**head["clock"]) if head["clock"] else None
    part = Part(head["rank"], spans, head["host"], node=head["node"], clock=clock)
    return RankFile(part, head["world_size"], problem)


def merge_folder(folder: Path, *, since: float = 0.0) -> Trace:
    """One trace of the rank files in a folder. Missing, truncated and broken files are named in its notes.

    Files that were last changed before the time `since` belong to another recording and are ignored.
    """
    files: dict[int, RankFile] = {}
    notes: list[str] = []
    seen: set[int] = set()
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or path.stat().st_mtime < since:
            continue
        rank = int(match[1])
        seen.add(rank)
        try:
            found = read_rank_file(path)
        except (ValueError, OSError) as error:
            notes.append(f"{path.name} cannot be read ({reason(error)}): rank {rank} is left out")
            continue
        if found.part.rank in files:
            notes.append(f"{path.name} holds rank {found.part.rank} again: it is left out")
            continue
        files[found.part.rank] = found
        if found.problem:
            notes.append(f"{path.name} {found.problem}")
    if not files:
        why = f": {'; '.join(notes)}" if notes else ""
        raise UsageError(f"{folder} holds no rank file that can be read{why}")
    seen |= files.keys()
    missing = [rank for rank in range(max(file.world_size for file in files.values())) if rank not in seen]
    notes += [f"{rank_file_name(rank)} is missing: rank {rank} is left out" for rank in missing[:_MAX_NAMED]]
    if len(missing) > _MAX_NAMED:
        notes.append(f"{len(missing) - _MAX_NAMED} further ranks are missing")
    merged = merge([file.part for file in files.values()])
    return replace(merged, notes=(*notes, *merged.notes), path=folder)


def missing_note(ranks: Sequence[int]) -> str:
    """The note of a trace that was written without these ranks."""
    return f"{named_ranks(ranks)} did not arrive in time: not in this trace"


def with_late_ranks(trace: Trace) -> Trace:
    """A trace that was written without some ranks, merged with the files that those ranks wrote into its folder."""
    listed = trace.metadata.get("missing")
    missing = [rank for rank in listed if type(rank) is int] if isinstance(listed, list) else []
    folder, notes = trace.path.parent, list(trace.notes)
    if any((folder / rank_file_name(rank)).is_file() for rank in missing):
        lasted = max(span.end for span in trace.spans) - min(span.start for span in trace.spans)
        merged = merge_folder(folder, since=trace.path.stat().st_mtime - lasted / 1e9 - _SLACK_S)
        added = [rank for rank in missing if rank in merged.ranks]
        if added and set(merged.ranks) >= set(trace.ranks):
            missing = [rank for rank in missing if rank not in added]
            metadata = {**trace.metadata, "missing": missing, **merged.metadata}
            trace = replace(merged, metadata=metadata, path=trace.path)
            notes += [f"{rank_file_name(rank)} beside the trace was merged with it" for rank in added]
    notes += [missing_note(missing)] if missing else []
    return replace(trace, notes=tuple(notes))


def has_rank_files(folder: Path) -> bool:
    """Whether a folder holds rank files."""
    return any(_NAME.fullmatch(path.name) for path in folder.iterdir())


class _Lines:
    """The lines of a file. `problem` says why they end early, in words that follow the file's name."""

    problem = ""

    def read(self, raw: BinaryIO) -> Iterator[str]:
        try:
            with gzip.open(raw) as file:
                left = _MAX_FILE_BYTES
                while line := file.readline(_MAX_LINE_BYTES):
                    left -= len(line)
                    if left < 0:
                        self.problem = f"has more than {_MAX_FILE_BYTES:,} bytes"
                    elif not line.endswith(b"\n"):
                        self.problem = "is cut off" if len(line) < _MAX_LINE_BYTES else "has a line that is too long"
                    if self.problem:
                        return
                    yield line.decode()
        except EOFError:
            self.problem = "is cut off"
        except (zlib.error, gzip.BadGzipFile) as error:
            self.problem = f"is damaged ({error})"
        except UnicodeDecodeError:
            self.problem = "is damaged (it is not text in UTF-8)"


def _head(text: str | None, problem: str) -> Mapping[str, Any]:
    if text is None:
        raise ValueError(f"it {problem}" if problem else "the first line is missing")
    head = parse_json(text)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError(f"the first line does not say '{FORMAT}'")
    types = {"rank": int, "world_size": int, "host": str, "spans": int}
    good = all(type(head.get(key)) is kind for key, kind in types.items())
    if not good or not 0 <= head["rank"] < head["world_size"] <= MAX_RANKS or not _is_clock(head.get("clock")):
        raise ValueError("the first line has invalid values")
    node = head.get("node")
    return {"clock": None, **head, "node": node if isinstance(node, str) else ""}


def _is_clock(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"offset", "drift", "error", "at"}:
        return value is None
    numbers = all(type(number) in (int, float) and abs(number) < MAX_TIME_NS for number in value.values())
    return numbers and type(value["at"]) is int
