"""Metadata of a trace, its `otherData`: facts about the ranks beside their spans, written and checked here."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncline.trace.span import MAX_TIME_NS

MAX_RANKS = 1 << 20
"""Limit of ranks and world sizes that are read from files."""
_MIN_BANDWIDTH, _MAX_BANDWIDTH = 1, 1e15  # bits per second


def rank_metadata(
    *,
    hosts: Mapping[int, str],
    cores: Mapping[int, int],
    cpu_times: Mapping[int, Sequence[Sequence[int]]],
    recorders: Sequence[Mapping[str, Any]],
    prediction_ms: float | None = None,
) -> dict[str, Any]:
    """The metadata entries about ranks; unknown ones are left out.

    hosts: by rank, `clocks.host_id()`. cores: by rank, how many its process may use; a host has the most of its ranks.
    cpu_times: by rank, the rows of `StepCpuTimes`. recorders: the `overhead.recording_cost` of the ranks; the most
    expensive one represents all.
    """
    entries: dict[str, Any] = {"hosts": {str(rank): hosts[rank] for rank in sorted(hosts)}}
    entries["cores"] = {
        host: max(cores[rank] for rank in hosts if hosts[rank] == host and rank in cores)
        for host in dict.fromkeys(hosts[rank] for rank in sorted(hosts) if rank in cores)
    }
    if any(cpu_times.values()):
        entries["usage"] = {
            str(rank): [list(row) for row in cpu_times[rank]] for rank in sorted(cpu_times) if cpu_times[rank]
        }
    if recorders:
        most_expensive = max(recorders, key=lambda entry: float(entry["overhead_ns_per_step"]))
        entries["recorder"] = {**most_expensive, "dropped": sum(int(entry["dropped"]) for entry in recorders)}
    if prediction_ms is not None:
        entries["prediction_ms"] = prediction_ms
    return entries


def checked_metadata(content: Any) -> dict[str, Any]:
    """The metadata of a file that may hold anything, without values that the analysis could not compute with.

    Numbers that are not finite or need more than 62 bits become None. Known entries with impossible values are left
    out. Unknown entries are kept.
    """
    if not isinstance(content, dict):
        return {}
    bounded = {key: _bounded(value) for key, value in content.items()}
    return {key: value for key, value in bounded.items() if key not in _CHECKS or _CHECKS[key](value)}


def _bounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_bounded(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if isinstance(value, int) and not -MAX_TIME_NS < value < MAX_TIME_NS else value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "strategy": _is_text,
    "backend": _is_text,
    "world_size": lambda value: type(value) is int and 0 < value <= MAX_RANKS,
    "origin_ns": lambda value: type(value) is int,
    "clock_error_ns": _is_number,
    "bandwidth": lambda value: _is_number(value) and _MIN_BANDWIDTH <= value <= _MAX_BANDWIDTH,
    "prediction_ms": lambda value: _is_number(value) and value > 0,
}
