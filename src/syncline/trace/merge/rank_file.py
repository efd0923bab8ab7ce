"""A rank's spans in a file of its own, and one trace from a folder of them.

A file is JSON lines, compressed: a head that says whose spans these are, then a row a span. A file that ends too early
gives the spans up to there.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from syncline.errors import UsageError
from syncline.trace.merge.clocks import Clock
from syncline.trace.merge.merge import Merged, Part, merge
from syncline.trace.span import MAX_TIME_NS, Span

FORMAT = "syncline spans 1"
_NAME = re.compile(r"rank(\d+)\.spans\.jsonl\.gz")
_LONGEST = 1 << 16  # bytes of a line
_MOST_BYTES, _MOST_SPANS, _MOST_RANKS = 1 << 28, 1_000_000, 1 << 20


@dataclass(frozen=True)
class RankFile:
    """What a file held; `trouble` says why that is not all, in words that follow the file's name."""

    part: Part
    world_size: int
    trouble: str = ""


def file_name(rank: int) -> str:
    """What a rank's file is called."""
    return f"rank{rank}.spans.jsonl.gz"


def write_part(part: Part, folder: Path, *, world_size: int) -> Path:
    """Write one rank's spans into a folder; returns the file."""
    path = folder / file_name(part.rank)
    head = {
        "format": FORMAT,
        "rank": part.rank,
        "world_size": world_size,
        "host": part.host,
        "clock": asdict(part.clock) if part.clock else None,
        "spans": len(part.spans),
    }
    temporary = path.with_name(path.name + ".part")
    with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=6) as file:
        file.write(json.dumps(head) + "\n")
        for span in part.spans:
            file.write(json.dumps(span.to_row()) + "\n")
    temporary.replace(path)
    return path


def read_part(path: Path) -> RankFile:
    """One rank's spans; `ValueError` where not even the head can be read."""
    with path.open("rb") as raw:
        lines = _lines(raw)
        head = _head(next(lines, None))
        spans: list[Span] = []
        trouble = ""
        for text in lines:
            if text is None:
                trouble = f"ends too early: {len(spans)} of {head['spans']} spans are there"
                break
            try:
                spans.append(Span.from_untrusted_row(head["rank"], _json(text)))
            except ValueError as error:
                trouble = f"is broken in line {len(spans) + 2} ({error}): {len(spans)} spans are kept"
                break
            if len(spans) == _MOST_SPANS and len(spans) < head["spans"]:
                trouble = f"has more than {_MOST_SPANS:,} spans: the rest is left out"
                break
    if not trouble and len(spans) < head["spans"]:
        trouble = f"ends too early: {len(spans)} of {head['spans']} spans are there"
    clock = Clock(**head["clock"]) if head["clock"] else None
    return RankFile(Part(head["rank"], spans, head["host"], clock), head["world_size"], trouble)


def merge_folder(folder: Path) -> Merged:
    """One trace of the rank files in a folder; a missing, cut or broken one is told of, the others are merged."""
    files: dict[int, RankFile] = {}
    notes: list[str] = []
    seen: set[int] = set()
    for path in sorted(folder.iterdir()):
        named = _NAME.fullmatch(path.name)
        if named is None:
            continue
        seen.add(int(named[1]))
        if not path.is_file():  # a pipe would be waited for
            notes.append(f"{path.name} is no file: rank {int(named[1])} is left out")
            continue
        try:
            found = read_part(path)
        except (ValueError, OSError) as error:
            notes.append(f"{path.name} cannot be read ({error}): rank {int(named[1])} is left out")
            continue
        if found.part.rank in files:
            notes.append(f"{path.name} holds rank {found.part.rank} once more: it is left out")
            continue
        files[found.part.rank] = found
        if found.trouble:
            notes.append(f"{path.name} {found.trouble}")
    if not files:
        why = f": {'; '.join(notes)}" if notes else ""
        raise UsageError(f"{folder} holds no spans of ranks that can be read{why}")
    seen |= files.keys()
    missing = [rank for rank in range(max(file.world_size for file in files.values())) if rank not in seen]
    notes += [f"{file_name(rank)} is missing: rank {rank} is left out" for rank in missing[:16]]
    if len(missing) > 16:
        notes.append(f"{len(missing) - 16} further ranks are missing")
    merged = merge([file.part for file in files.values()])
    return Merged(merged.spans, (*notes, *merged.notes), merged.clock_error_ns)


def has_parts(folder: Path) -> bool:
    """Whether a folder holds rank files."""
    return any(_NAME.fullmatch(path.name) for path in folder.iterdir())


def _lines(raw: BinaryIO) -> Iterator[str | None]:
    """The lines; None where the file ends within one, or cannot be uncompressed further."""
    try:
        with gzip.open(raw) as file:
            left = _MOST_BYTES
            while line := file.readline(_LONGEST):
                left -= len(line)
                if left < 0 or not line.endswith(b"\n"):
                    yield None
                    return
                yield line.decode()
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError):
        yield None


def _head(text: str | None) -> Mapping[str, Any]:
    if text is None:
        raise ValueError("its first line is not there")
    head = _json(text)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError(f"its first line does not say '{FORMAT}'")
    kinds = {"rank": int, "world_size": int, "host": str, "spans": int}
    good = all(type(head.get(key)) is kind for key, kind in kinds.items())
    if not good or not 0 <= head["rank"] < head["world_size"] <= _MOST_RANKS or not _is_clock(head.get("clock")):
        raise ValueError("its first line has other values than ours")
    return {"clock": None, **head}


def _is_clock(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() != {"offset", "drift", "error", "at"}:
        return False
    numbers = all(type(number) in (int, float) and abs(number) < MAX_TIME_NS for number in value.values())
    return numbers and type(value["at"]) is int


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
