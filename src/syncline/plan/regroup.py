"""Other groupings, one change away: two neighbours joined, or one unit split."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from syncline.plan.candidates import renumbered
from syncline.plan.table import Plan
from syncline.plan.unit import Part, Shape, Unit

MOST = 8
"""So many units are split, the largest; so many pairs joined, the smallest."""


def regrouped(plan: Plan, shapes: Mapping[str, Shape]) -> Iterator[Plan]:
    """The plan with one unit more or less. A module's parameters stay together."""
    values = [sum(shapes[name].values for name in unit.parameters) for unit in plan.units]
    for at in sorted(range(len(values)), key=lambda at: -values[at])[:MOST]:
        if halves := _split(plan.units[at], shapes):
            yield from _with(plan, {plan.units[at].name}, halves)
    pairs = range(len(values) - 1)
    for at in sorted(pairs, key=lambda at: values[at] + values[at + 1])[:MOST]:
        if one := _joined(plan.units[at], plan.units[at + 1], shapes):
            yield from _with(plan, {plan.units[at].name, plan.units[at + 1].name}, (one,))


def _split(unit: Unit, shapes: Mapping[str, Shape]) -> tuple[Unit, ...]:
    """Two units of about equal size; none from a single module."""
    modules = [list(names) for _, names in groupby(unit.parameters, key=_module)]
    if len(modules) < 2:
        return ()
    sums = list(accumulate(sum(shapes[name].values for name in names) for names in modules))
    at = min(range(1, len(modules)), key=lambda at: abs(2 * sums[at - 1] - sums[-1]))
    share = sums[at - 1] / sums[-1] if sums[-1] else 0.5
    counts = [max(1, round(unit.partitions * part)) for part in (share, 1 - share)]
    made = []
    for run, count in zip((modules[:at], modules[at:]), counts, strict=True):
        names = tuple(name for module in run for name in module)
        parts = min(count, max(1, sum(shapes[name].values for name in names)))
        made.append(replace(unit, name=_named(names), parameters=names, partitions=parts))
    return tuple(made)


def _joined(first: Unit, second: Unit, shapes: Mapping[str, Shape]) -> Unit | None:
    """One unit of two, if they are sent alike."""
    kinds = {(u.codec, u.exchange, shapes[u.parameters[0]].dtype) for u in (first, second)}
    if len(kinds) > 1:
        return None
    names = first.parameters + second.parameters
    parts = first.partitions + second.partitions
    return replace(first, name=_named(names), parameters=names, partitions=parts if parts > 2 else 1)


def _with(plan: Plan, old: set[str], new: Sequence[Unit]) -> Iterator[Plan]:
    """New units in place of old ones, the later of them launched first; nothing where a name is taken."""
    kept = [unit for unit in plan.units if unit.name not in old]
    if len({unit.name for unit in (*kept, *new)}) < len(kept) + len(new):
        return
    at = next(n for n, unit in enumerate(plan.units) if unit.name in old)
    places = [n for n, (name, _) in enumerate(plan.order) if name in old]
    launches = [unit.name for unit in reversed(new) for _ in range(unit.partitions)]
    # Fewer launches than places: the first places go, for what was ready there may not be now.
    used = dict(zip(places[-len(launches) :], launches, strict=False))
    order: list[Part] = []
    for n, (name, part) in enumerate(plan.order):
        if name not in old:
            order.append((name, part))
        elif n in used:
            order.append((used[n], 0))
        if n == places[-1]:
            order += [(name, 0) for name in launches[len(used) :]]
    yield Plan((*kept[:at], *new, *kept[at:]), renumbered(order), plan.about)


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _named(names: Sequence[str]) -> str:
    first, last = _module(names[0]), _module(names[-1])
    return first if first == last else f"{first}..{last}"
