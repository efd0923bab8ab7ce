"""Check of the metadata (`otherData`) of a trace file, which holds facts about the run and its ranks."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from syncline.trace.span import MAX_TIME_NS

MAX_RANKS = 1 << 20
"""Limit of ranks and world sizes that are read from files."""


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


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "strategy": lambda value: isinstance(value, str),
    "backend": lambda value: isinstance(value, str),
    "world_size": lambda value: type(value) is int and 0 < value <= MAX_RANKS,
    "origin_ns": lambda value: type(value) is int,
    "clock_error_ns": _is_number,
    "bandwidth": lambda value: _is_number(value) and 1 <= value <= 1e15,  # bits per second
    "prediction_ms": lambda value: _is_number(value) and value > 0,
}
