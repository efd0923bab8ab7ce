"""The table of units, one row per unit: its size, when it was ready, launched and done, and its exposed time."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.stats import mean
from syncline.trace.analysis.steps import Prepared
from syncline.trace.merge.exchanges import Member


@dataclass(frozen=True)
class UnitRow:
    """Means over the ranks and usual steps that have the unit; times are ms from the start of the step."""

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
    """Ms per step that no compute hid, over all steps; exchanges that were under way at once share it equally."""


def unit_table(trace: Prepared, steps: Sequence[int]) -> list[UnitRow]:
    """The units of these steps, those with the most exposed time per step first."""
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
    rows = []
    for (rank, step), members in of.items():
        origin = trace.bounds[rank][step][0]
        joined = min(one.joined for one in members)
        times = (
            min(joined, ready.get((rank, step, unit), joined)) - origin,
            joined - origin,
            max(one.ended for one in members) - origin,
            sum(one.started - one.joined for one in members),
            sum(one.ended - one.started for one in members),
            sum(trace.exposed_ns(one.transfer) for one in members),
        )
        rows.append((sum(one.bytes for one in members), *(ns / 1e6 for ns in times)))
    columns = list(zip(*rows, strict=True))
    size, first, launch, end, wait, transfer = (mean(column) for column in columns[:-1])
    ranks = len({rank for rank, _ in of})
    return UnitRow(
        unit=unit,
        name=name,
        bytes=size,
        count=sum(len(members) for members in of.values()) / max(1, ranks * steps),
        ready_ms=first,
        launch_ms=launch,
        end_ms=end,
        wait_ms=wait,
        transfer_ms=transfer,
        bandwidth_bits=size * 8e3 / transfer if transfer > 0 and size > 0 else None,
        exposed_ms=sum(columns[-1]) / max(1, ranks * steps),
    )
