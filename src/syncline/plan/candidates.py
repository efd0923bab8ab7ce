"""The plans that are weighed: groupings of a model, a codec and an exchange for all units, sizes of parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from syncline.plan.costs import Costs
from syncline.plan.default import default_plan
from syncline.plan.predict import built, carriers, job
from syncline.plan.table import Plan
from syncline.plan.unit import Part, Shape, Unit

GROUPS = (0, 1 << 18, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Bytes of gradients up to which neighbours are put together."""
SHARES = (1, 8, 32, 128)
"""No part is longer than the whole step's wire divided by one of these."""
PART_BYTES = 1 << 18
"""Smaller parts are not made: each costs a latency."""


def groupings(shapes: Sequence[Shape]) -> list[tuple[Unit, ...]]:
    """Units without codecs, finest first; what turns out alike is there once."""
    made = [default_plan(shapes, group_bytes=size, part_bytes=1 << 60).units for size in GROUPS]
    return list(dict.fromkeys(made))


def plans(units: Sequence[Unit], shapes: Mapping[str, Shape], costs: Costs, codec: str) -> Iterator[Plan]:
    """These units with one codec for all: each exchange worth weighing, and several sizes of parts."""
    for carrier in carriers(codec, costs.world):
        whole = [replace(unit, codec=codec, exchange=carrier, partitions=1) for unit in units]
        wire = [wire_of(unit, shapes, costs) for unit in whole]
        seen: set[tuple[int, ...]] = set()
        for share in SHARES:
            most = max(sum(wire) / share, PART_BYTES / costs.link.bytes_per_s)
            counts = tuple(cut(u, shapes, ceil(w / most) if most else 1) for u, w in zip(whole, wire, strict=True))
            if counts not in seen:
                seen.add(counts)
                parted = tuple(replace(unit, partitions=n) for unit, n in zip(whole, counts, strict=True))
                yield Plan(parted, tuple((u.name, part) for u in reversed(parted) for part in range(u.partitions)))


def wire_of(unit: Unit, shapes: Mapping[str, Shape], costs: Costs) -> float:
    """Seconds for which all parts of a unit fill the wire."""
    return unit.partitions * sum(one.wire for one in job(unit, shapes, costs).rounds)


def cut(unit: Unit, shapes: Mapping[str, Shape], parts: int) -> int:
    """So many parts, or what the unit allows: a factorisation needs whole matrices."""
    if built(unit.codec).view == "matrix":
        return 1
    return max(1, min(parts, sum(shapes[name].values for name in unit.parameters)))


def exchanged(plan: Plan, units: Mapping[str, Unit]) -> Plan:
    """The plan with these units in place of those of their names; launches stay where they are.

    A unit of fewer parts keeps its first places; one of more has the new parts behind its last.
    """
    table = tuple(units.get(unit.name, unit) for unit in plan.units)
    parts = {unit.name: unit.partitions for unit in table}
    before = {unit.name: unit.partitions for unit in plan.units}
    order: list[Part] = []
    done = dict.fromkeys(parts, 0)
    met = dict.fromkeys(parts, 0)
    for name, _ in plan.order:
        met[name] += 1
        until = parts[name] if met[name] == before[name] else min(parts[name], done[name] + 1)
        order += [(name, part) for part in range(done[name], until)]
        done[name] = until
    return Plan(table, tuple(order), plan.about)


def renumbered(order: Sequence[Part]) -> tuple[Part, ...]:
    """The same with the parts of a unit in their order: they are alike, and a table reads better so."""
    count: dict[str, int] = {}
    out = []
    for name, _ in order:
        count[name] = count.get(name, -1) + 1
        out.append((name, count[name]))
    return tuple(out)
