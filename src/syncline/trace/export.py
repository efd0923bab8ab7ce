"""Chrome trace JSON that chrome://tracing and Perfetto accept: spans of a track nest strictly."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from syncline.trace.span import LANES, Span


def chrome_trace(spans: Iterable[Span], *, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """The trace as a JSON object: a process a rank, a thread a lane, more threads where spans of a lane overlap."""
    spans = sorted(spans, key=lambda s: (s.start, -s.end))
    origin = spans[0].start if spans else 0
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, str], list[int]] = defaultdict(list)
    for span in spans:
        ends = tracks[span.rank, span.lane]
        slot = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        ends[slot : slot + 1] = [span.end]
        events.append(
            {
                "ph": "X",
                "name": f"{span.name} {span.unit}".strip(),
                "cat": span.lane,
                "pid": span.rank,
                "tid": _thread(span.lane, slot),
                "ts": (span.start - origin) / 1000,
                "dur": (span.end - span.start) / 1000,
                "args": {"step": span.step, "unit": span.unit, "bytes": span.bytes},
            }
        )
    return {"traceEvents": [*_names(tracks), *events], "displayTimeUnit": "ms", "otherData": metadata or {}}


def write_chrome_trace(spans: Iterable[Span], path: Path, *, metadata: dict[str, Any] | None = None) -> None:
    """Write the trace atomically, compressed when the name ends in `.gz`."""
    data = json.dumps(chrome_trace(spans, metadata=metadata)).encode()
    part = path.with_name(path.name + ".part")
    part.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    part.replace(path)


def _thread(lane: str, slot: int) -> int:
    return (LANES.index(lane) + 1 if lane in LANES else 0) * 100 + slot


def _names(tracks: dict[tuple[int, str], list[int]]) -> list[dict[str, Any]]:
    names: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in tracks}):
        names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for (rank, lane), ends in sorted(tracks.items()):
        for slot in range(len(ends)):
            label = lane if slot == 0 else f"{lane} {slot + 1}"
            tid = _thread(lane, slot)
            names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": label}})
            names.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}})
    return names
