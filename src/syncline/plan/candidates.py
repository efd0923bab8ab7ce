"""Candidate plans: groupings of parameters into units, codecs, exchanges, numbers of parts, and single changes."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from math import ceil

from syncline.plan.costs import Costs
from syncline.plan.default import default_plan
from syncline.plan.predict import built, exchanges_to_weigh, job
from syncline.plan.table import Plan
from syncline.plan.unit import Part, Shape, Unit

GROUP_SIZES = (0, 1 << 18, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Sizes, in bytes of gradients, up to which neighbouring modules are grouped."""
SHARES = (1, 8, 32, 128)
"""No part takes longer to send than the whole step's bytes divided by one of these."""
SMALLEST_PART_BYTES = 1 << 18
"""Parts are not made smaller than this, because each costs a latency."""
MOST_REGROUPED = 8
"""How many of the largest units are split, and how many of the smallest neighbours are joined."""


def groupings(shapes: Sequence[Shape], sizes: Sequence[int] = GROUP_SIZES) -> list[tuple[Unit, ...]]:
    """Different groupings as units without codecs, finest first, without duplicates."""
    made = [default_plan(shapes, group_bytes=size, part_bytes=1 << 60).units for size in sizes]
    return list(dict.fromkeys(made))


def plans(units: Sequence[Unit], shapes: Mapping[str, Shape], costs: Costs, codec: str) -> Iterator[Plan]:
    """Plans of these units with one codec for all: each exchange worth weighing, and several sizes of parts."""
    for carrier in exchanges_to_weigh(codec, costs.world, costs.node):
        whole = [replace(unit, codec=codec, exchange=carrier, partitions=1) for unit in units]
        wire = [wire_seconds(unit, shapes, costs) for unit in whole]
        seen: set[tuple[int, ...]] = set()
        for share in SHARES:
            most = max(sum(wire) / share, SMALLEST_PART_BYTES / costs.link.bytes_per_s)
            counts = tuple(
                part_count(u, shapes, ceil(w / most) if most else 1) for u, w in zip(whole, wire, strict=True)
            )
            if counts not in seen:
                seen.add(counts)
                parted = tuple(replace(unit, partitions=n) for unit, n in zip(whole, counts, strict=True))
                yield Plan(parted, tuple((u.name, part) for u in reversed(parted) for part in range(u.partitions)))


def wire_seconds(unit: Unit, shapes: Mapping[str, Shape], costs: Costs) -> float:
    """Seconds that all parts of a unit take on the network."""
    return unit.partitions * sum(one.wire for one in job(unit, shapes, costs).rounds)


def part_count(unit: Unit, shapes: Mapping[str, Shape], parts: int) -> int:
    """`parts`, or as many as the unit allows: a factorisation needs whole matrices."""
    if built(unit.codec).view == "matrix":
        return 1
    return max(1, min(parts, sum(shapes[name].values for name in unit.parameters)))


def with_units(plan: Plan, units: Mapping[str, Unit]) -> Plan:
    """The plan with the units of these names replaced; launches keep their positions.

    A unit with fewer parts keeps its first positions; one with more parts adds the new ones after its last.
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


def renumber_parts(order: Sequence[Part]) -> tuple[Part, ...]:
    """The order with the parts of each unit numbered in sequence: parts are equal, and the table is easier to read."""
    count: dict[str, int] = {}
    out = []
    for name, _ in order:
        count[name] = count.get(name, -1) + 1
        out.append((name, count[name]))
    return tuple(out)


def regroupings(plan: Plan, shapes: Mapping[str, Shape]) -> Iterator[Plan]:
    """Plans with one unit more or less: one split, or two neighbours joined. A module's parameters stay together."""
    values = [sum(shapes[name].values for name in unit.parameters) for unit in plan.units]
    for at in sorted(range(len(values)), key=lambda at: -values[at])[:MOST_REGROUPED]:
        if halves := _split(plan.units[at], shapes):
            yield from _with(plan, {plan.units[at].name}, halves)
    pairs = range(len(values) - 1)
    for at in sorted(pairs, key=lambda at: values[at] + values[at + 1])[:MOST_REGROUPED]:
        if one := _joined(plan.units[at], plan.units[at + 1], shapes):
            yield from _with(plan, {plan.units[at].name, plan.units[at + 1].name}, (one,))


def _split(unit: Unit, shapes: Mapping[str, Shape]) -> tuple[Unit, ...]:
    """Split a unit into two of about equal size; empty if it is a single module."""
    modules = [list(names) for _, names in groupby(unit.parameters, key=_module)]
    if len(modules) < 2:
        return ()
    sums = list(accumulate(sum(shapes[name].values for name in names) for names in modules))
    at = min(range(1, len(modules)), key=lambda at: abs(2 * sums[at - 1] - sums[-1]))
    return _pieces(unit, [[name for module in run for name in module] for run in (modules[:at], modules[at:])], shapes)


def split_where(plan: Plan, shapes: Mapping[str, Shape], kind: Callable[[Unit], Hashable]) -> Plan:
    """The plan with each unit split into runs of neighbouring modules of one `kind`, which gets a module as a unit."""
    for unit in plan.units:
        modules = [list(names) for _, names in groupby(unit.parameters, key=_module)]
        runs = [
            [name for module in run for name in module]
            for _, run in groupby(modules, key=lambda names: kind(replace(unit, parameters=tuple(names))))
        ]
        if len(runs) > 1:
            plan = next(_with(plan, {unit.name}, _pieces(unit, runs, shapes)), plan)
    return plan


def _pieces(unit: Unit, runs: Sequence[Sequence[str]], shapes: Mapping[str, Shape]) -> tuple[Unit, ...]:
    """The unit as one unit for each run of its parameters, with its parts divided by size."""
    sizes = [sum(shapes[name].values for name in run) for run in runs]
    made = []
    for run, size in zip(runs, sizes, strict=True):
        count = round(unit.partitions * (size / sum(sizes) if sum(sizes) else 1 / len(runs)))
        parts = max(1, min(count, size))
        made.append(replace(unit, name=_named(run), parameters=tuple(run), partitions=parts))
    return tuple(made)


def _joined(first: Unit, second: Unit, shapes: Mapping[str, Shape]) -> Unit | None:
    """Join two units, if they have the same codec, exchange and dtype."""
    kinds = {(u.codec, u.exchange, shapes[u.parameters[0]].dtype) for u in (first, second)}
    if len(kinds) > 1:
        return None
    names = first.parameters + second.parameters
    parts = first.partitions + second.partitions
    return replace(first, name=_named(names), parameters=names, partitions=parts if parts > 2 else 1)


def _with(plan: Plan, old: set[str], new: Sequence[Unit]) -> Iterator[Plan]:
    """The plan with old units replaced by new ones, the later launched first; nothing if a name is already used."""
    kept = [unit for unit in plan.units if unit.name not in old]
    if len({unit.name for unit in (*kept, *new)}) < len(kept) + len(new):
        return
    at = next(n for n, unit in enumerate(plan.units) if unit.name in old)
    places = [n for n, (name, _) in enumerate(plan.order) if name in old]
    launches = [unit.name for unit in reversed(new) for _ in range(unit.partitions)]
    # With fewer launches than places, drop the first places: the joined unit may not be ready there.
    used = dict(zip(places[-len(launches) :], launches, strict=False))
    order: list[Part] = []
    for n, (name, part) in enumerate(plan.order):
        if name not in old:
            order.append((name, part))
        elif n in used:
            order.append((used[n], 0))
        if n == places[-1]:
            order += [(name, 0) for name in launches[len(used) :]]
    yield Plan((*kept[:at], *new, *kept[at:]), renumber_parts(order), plan.about)


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _named(names: Sequence[str]) -> str:
    first, last = _module(names[0]), _module(names[-1])
    return first if first == last else f"{first}..{last}"
