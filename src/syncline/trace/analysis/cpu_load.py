"""CPU load of the hosts: CPU time and scheduling delay of the ranks, from the trace's `usage`, `hosts` and `cores`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.stats import mean_or_zero


@dataclass(frozen=True)
class HostLoad:
    """How busy one host was, over the usual steps.

    delay_ms: for each step, how long the training thread of the rank that all others waited for was ready to run and
    had no core; 0 if that rank is on another host. A delay of a rank that waits anyway costs nothing.
    cpu_ms: CPU time per step of all ranks there; None if it was not measured. cores: 0 if unknown.
    """

    ranks: tuple[int, ...]
    cores: int
    cpu_ms: float | None
    delay_ms: tuple[float, ...]
    by_rank: Mapping[int, float]
    """Each rank's delay per step."""


def host_loads(
    metadata: Mapping[str, Any], ranks: Sequence[int], steps: Sequence[int], *, awaited: Sequence[int]
) -> tuple[HostLoad, ...]:
    """One row per host; none if the trace has neither usage nor cores. Invalid entries are skipped.

    `awaited` is, for each step, the rank that waited least.
    """
    rows = {rank: _rows(_table(metadata, "usage").get(str(rank))) for rank in ranks}
    cores = _table(metadata, "cores")
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(str(_table(metadata, "hosts").get(str(rank), "")), []).append(rank)
    result = []
    for host, members in hosts.items():
        counted = [rank for rank in members if any(step in rows[rank] for step in steps)]
        number = cores.get(host, next(iter(cores.values()), 0) if len(cores) == 1 else 0)
        if not counted and type(number) is not int:
            continue
        delays = {rank: [rows[rank].get(step, (0, 0))[1] / 1e6 for step in steps] for rank in counted}
        spent = [sum(rows[rank].get(step, (0, 0))[0] for rank in counted) / 1e6 for step in steps]
        result.append(
            HostLoad(
                ranks=tuple(members),
                cores=number if type(number) is int and number > 0 else 0,
                cpu_ms=mean_or_zero(spent) if counted else None,
                delay_ms=tuple(delays[r][n] if r in delays else 0.0 for n, r in enumerate(awaited)) if counted else (),
                by_rank={rank: mean_or_zero(values) for rank, values in delays.items()},
            )
        )
    return tuple(result)


def _table(metadata: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = metadata.get(key)
    return value if isinstance(value, dict) else {}


def _rows(value: Any) -> dict[int, tuple[int, int]]:
    """By step: CPU time of the process, scheduling delay of its training thread."""
    if not isinstance(value, list):
        return {}
    good = (r for r in value if isinstance(r, list) and len(r) == 3 and all(type(n) is int for n in r))
    return {step: (max(0, cpu), max(0, delay)) for step, cpu, delay in good}
