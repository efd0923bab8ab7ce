"""The table of units, one row per unit: its size, when it was ready, launched and done, and its exposed time."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.stats import mean_or_zero, median_or_zero
from syncline.trace.analysis.steps import Prepared
from syncline.trace.merge.exchanges import Member


@dataclass(frozen=True)
class UnitRow:
    """Medians over steady steps and ranks; times are ms from the start of the unit's step."""

    unit: str
    name: str
    bytes: float
    count: float
    """Exchanges per step."""
    ready_ms: float
    launch_ms: float
    end_ms: float
    wait_ms: float
    transfer_ms: float
    bandwidth_bits: float | None
    exposed_ms: float
    """Time that no compute hid; exchanges that were under way at once share it equally."""


def unit_table(trace: Prepared, steps: Sequence[int]) -> list[UnitRow]:
    """The units of these steps, those with the most exposed time first."""
    kept, workers = set(steps), set(trace.ranks)
    ready = _encoded(trace, kept)
    rows: dict[tuple[str, str], dict[tuple[int, int], list[Member]]] = defaultdict(lambda: defaultdict(list))
    for exchange in trace.exchanges:
        if exchange.step in kept:
            for member in exchange.members:
                if member.transfer is not None and member.rank in workers:
                    rows[exchange.name, exchange.unit][member.rank, exchange.step].append(member)
    table = [_row(trace, name, unit, of, ready, len(steps)) for (name, unit), of in rows.items()]
    return sorted(table, key=lambda row: (-row.exposed_ms, row.launch_ms))


def _encoded(trace: Prepared, kept: set[int]) -> dict[tuple[int, int, str], int]:
    """By rank, step and unit: when the encoding of its gradient started, so the gradient was ready."""
    found: dict[tuple[int, int, str], int] = {}
    for rank in trace.ranks:
        for span in trace.spans[rank]:
            if span.lane == "encode" and span.step in kept:
                found.setdefault((rank, span.step, span.unit), span.start)
    return found


def _row(
    trace: Prepared,
    name: str,
    unit: str,
    of: dict[tuple[int, int], list[Member]],
    ready: dict[tuple[int, int, str], int],
    steps: int,
) -> UnitRow:
    columns: list[list[float]] = [[] for _ in range(7)]
    first, launch, end, size, wait, transfer, exposed = columns
    for (rank, step), members in of.items():
        origin = trace.bounds[rank][step][0]
        joined = min(one.joined for one in members)
        first.append((min(joined, ready.get((rank, step, unit), joined)) - origin) / 1e6)
        launch.append((joined - origin) / 1e6)
        end.append((max(one.ended for one in members) - origin) / 1e6)
        size.append(sum(one.bytes for one in members))
        wait.append(sum(one.started - one.joined for one in members) / 1e6)
        transfer.append(sum(one.ended - one.started for one in members) / 1e6)
        exposed.append(sum(trace.exposed_ns(one.transfer) for one in members) / 1e6)
    lasted = median_or_zero(transfer)
    ranks = len({rank for rank, _ in of})
    return UnitRow(
        unit=unit,
        name=name,
        bytes=median_or_zero(size),
        count=sum(len(members) for members in of.values()) / max(1, ranks * steps),
        ready_ms=median_or_zero(first),
        launch_ms=median_or_zero(launch),
        end_ms=median_or_zero(end),
        wait_ms=median_or_zero(wait),
        transfer_ms=lasted,
        bandwidth_bits=median_or_zero(size) * 8e3 / lasted if lasted > 0 and median_or_zero(size) > 0 else None,
        exposed_ms=mean_or_zero(exposed),
    )
