"""Time of each operator in each step: of a GPU's kernels, of the host's ops, or of the named spans of a recording."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from syncline.trace.analysis.steps import Prepared
from syncline.trace.span import STEP, Span

_OTHER_LANES = frozenset({STEP, "exchange", "wait"})


def operator_series(trace: Prepared, steps: Sequence[int], metadata: Mapping[str, Any]) -> dict[str, list[float]]:
    """By operator: its ms in each of these steps, the mean over ranks. Operators that run at once count each."""
    place = {step: number for number, step in enumerate(steps)}
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    each = 1e6 * max(1, len(trace.ranks))
    on_host = host_operators(metadata.get("operators"))
    for rank in trace.ranks:
        for step, name, ns in on_host.get(rank, ()):
            if step in place:
                found[name][place[step]] += ns / each
        for span in trace.spans[rank] if rank not in on_host else ():
            if span.step in place and span.lane not in _OTHER_LANES:
                found[_name(span)][place[span.step]] += (span.end - span.start) / each
    return dict(found)


def host_operators(content: object) -> dict[int, list[tuple[int, str, int]]]:
    """By rank: step, operator and nanoseconds, from a trace's metadata, which may hold anything."""
    result: dict[int, list[tuple[int, str, int]]] = {}
    for rank, rows in content.items() if isinstance(content, dict) else ():
        if isinstance(rank, str) and rank.isdecimal() and len(rank) < 10 and isinstance(rows, list):
            good = (row for row in rows if isinstance(row, list) and [type(value) for value in row] == [int, str, int])
            result[int(rank)] = [(step, name, ns) for step, name, ns in good if ns >= 0]
    return result


def _name(span: Span) -> str:
    """A kernel belongs to the operator that started it, which is its unit; other spans have a name."""
    return (span.stream and span.unit) or span.name
