"""What a trace says of its ranks beside their spans: the `otherData` that the analysis reads."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FAR = 1 << 62
_MOST_RANKS = 1 << 20
_SLOWEST, _FASTEST = 1, 1e15  # bits a second of a link


def sane(told: Any) -> dict[str, Any]:
    """`otherData` as a file holds it, without what no trace of ours says; the analysis can count with the rest.

    A number that is not finite or fits no 62 bits becomes None, and an entry whose value cannot be is left out. Entries
    that are not known stay.
    """
    if not isinstance(told, dict):
        return {}
    bounded = {key: _bounded(value) for key, value in told.items()}
    return {key: value for key, value in bounded.items() if key not in _SANE or _SANE[key](value)}


def _bounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_bounded(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if isinstance(value, int) and not -_FAR < value < _FAR else value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_SANE: Mapping[str, Callable[[Any], bool]] = {
    "strategy": _is_text,
    "backend": _is_text,
    "world_size": lambda value: type(value) is int and 0 < value <= _MOST_RANKS,
    "origin_ns": lambda value: type(value) is int,
    "clock_error_ns": _is_number,
    "bandwidth": lambda value: _is_number(value) and _SLOWEST <= value <= _FASTEST,
    "prediction_ms": lambda value: _is_number(value) and value > 0,
}


def together(
    *,
    hosts: Mapping[int, str],
    cores: Mapping[int, int],
    usage: Mapping[int, Sequence[Sequence[int]]],
    recorders: Sequence[Mapping[str, Any]],
    prediction_ms: float | None = None,
) -> dict[str, Any]:
    """The entries of all ranks in one; what is not known is left out.

    hosts: by rank, `clocks.host()`. cores: by rank, what its process may use; a host's are its ranks' most.
    usage: by rank, the rows of `Usage`. recorders: `cost.facts` of each rank; the dearest one stands for all.
    """
    made: dict[str, Any] = {"hosts": {str(rank): hosts[rank] for rank in sorted(hosts)}}
    made["cores"] = {
        host: max(cores[rank] for rank in hosts if hosts[rank] == host and rank in cores)
        for host in dict.fromkeys(hosts[rank] for rank in sorted(hosts) if rank in cores)
    }
    if any(usage.values()):
        made["usage"] = {str(rank): [list(row) for row in usage[rank]] for rank in sorted(usage) if usage[rank]}
    if recorders:
        dearest = max(recorders, key=lambda facts: float(facts["overhead_ns_per_step"]))
        made["recorder"] = {**dearest, "dropped": sum(int(facts["dropped"]) for facts in recorders)}
    if prediction_ms is not None:
        made["prediction_ms"] = prediction_ms
    return made
