"""The planner: search for the plan with the shortest simulated step. The answer may be: do not compress.

For every allowed codec it compares groupings, numbers of parts and exchanges, and searches for the best launch order of
the best ones. Then it gives units different codecs. With measured errors, the plan stays inside an error budget. The
search is limited by counted work, not by time, so the same costs give the same plan on every rank. See docs/planner.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from syncline.errors import UsageError
from syncline.plan.candidates import (
    groupings,
    part_count,
    plans,
    regroupings,
    renumber_parts,
    split_where,
    wire_seconds,
    with_units,
)
from syncline.plan.costs import Costs
from syncline.plan.errors import Budget, Errors
from syncline.plan.launch_order import SLACK, arrange, greedy_launch_order
from syncline.plan.per_unit_codecs import fastest_alone, mix_codecs, within_budget
from syncline.plan.predict import built, predict, scenario
from syncline.plan.quality import ByError, ByOrder, Quality
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit
from syncline.sim import Outcome, simulate

ALWAYS = ("none", "bf16")
"""Codecs that are always candidates."""
WORTH = 0.03
"""A codec that loses more must be predicted to be faster by more than this share."""
ANY = 1e-3
"""Smaller differences in step time are ignored."""
QUICK, LONG = 6_000, 40_000
"""Simulated launches to order a plan: for one candidate of many, and for the chosen plan."""
LOOKED = 3
"""How many plans of a codec get a search for the best order."""
REGROUPED = 6
"""How many times units may be joined or split."""
NEAR, LIGHT = 0.1, 0.5
"""A plan that loses more is a contender if it is predicted to be slower by at most the first share, and to take at most
the second share of the time on the network: bytes are known, while the codec's time is only an estimate."""
FAR = 1.3
"""A codec whose best plan in greedy order is slower than the best of all by this factor is not searched further."""


@dataclass(frozen=True)
class Weighed:
    """A candidate plan with its predicted step."""

    name: str
    plan: Plan
    step: float


@dataclass(frozen=True)
class FrontierPoint:
    """The fastest plan that was found inside one error budget."""

    limit: float
    error: float
    """The plan's error, at most `limit`."""
    step: float
    plan: Plan


@dataclass(frozen=True)
class Choice:
    """The planner's answer: the plan, its predicted step, the alternatives, and the reason."""

    plan: Plan
    step: float
    bound: float
    alternatives: tuple[Weighed, ...]
    """The best plan of every codec that was weighed, and the best mixture, fastest first."""
    why: str
    frontier: tuple[FrontierPoint, ...] = ()
    """Predicted step against error, least error first; empty if no errors were measured."""
    contender: "Choice | None" = None
    """A plan inside the error budget that loses more, sends much less and is predicted to be about as fast. Predictions
    are not good enough to leave it out, so it should be timed as well; None if there is none."""


def search(
    shapes: Sequence[Shape],
    costs: Costs,
    *,
    allowed: Sequence[str] = (),
    mix: bool = True,
    always: Sequence[str] = ALWAYS,
    errors: Errors | None = None,
    budget: Budget | None = None,
) -> Choice:
    """The best plan under these costs.

    `allowed` are lossy codecs that may be chosen; `always` are weighed before them. With measured `errors` the plan
    stays inside the `budget` (None: the default one). Without them, name the codecs of `allowed` best quality first. To
    plan for one codec alone: `search(shapes, costs, allowed=["powersgd(rank=64)"], always=(), mix=False)`.
    """
    names = list(dict.fromkeys(built(name).text for name in (*always, *allowed)))
    if not names:
        raise UsageError("no codec to weigh: name one in allowed, or leave always as it is")
    quality: Quality = ByOrder(names) if errors is None else ByError(errors, budget or Budget())
    units = groupings(shapes)
    looked = {name: candidates(units, shapes, costs, name) for name in names}
    least = min(found[0][0] for found in looked.values())
    best = [_best_of(found, shapes, costs, name, far=found[0][0] > FAR * least) for name, found in looked.items()]
    chosen = _chosen(best, quality)
    weighed = {entry.name: entry for entry in best}
    frontier: tuple[FrontierPoint, ...] = ()
    if isinstance(quality, ByError):
        frontier = _frontier(best, shapes, costs, names, quality)
        mixed = [_named(point.plan, point.step) for point in frontier if point.limit <= quality.budget.error]
        chosen = _chosen([chosen, *mixed], quality)
        chosen = _tried_one_by_one(chosen, shapes, costs, names, quality) if mix else chosen
        weighed[chosen.name] = chosen
    elif mix and len(names) > 1:
        # First without codecs that lose more than the chosen one, then with all.
        for limit in sorted({names.index(chosen.name) + 1, len(names)} - {1}):
            found = _mixture(chosen, shapes, costs, names[:limit], quality)
            if found.name not in weighed or found.step < weighed[found.name].step:
                weighed[found.name] = found
            worth = WORTH if quality.lost(found.plan.units) > quality.lost(chosen.plan.units) else ANY
            if found.step < chosen.step * (1 - worth):
                chosen = found
    chosen = _improved(chosen, shapes, costs)
    weighed[chosen.name] = chosen
    alternatives = tuple(sorted(weighed.values(), key=lambda entry: entry.step))
    plan, outcome = _finished(chosen, shapes, costs, quality)
    why = _why(chosen, alternatives, costs, outcome, quality)
    contender = None
    if isinstance(quality, ByError):
        among = [*best, *(_named(point.plan, point.step) for point in frontier)]
        contender = _contender(chosen, among, shapes, costs, quality)
    return Choice(plan, chosen.step, outcome.bound, alternatives, why, frontier, contender)


def _finished(entry: Weighed, shapes: Sequence[Shape], costs: Costs, quality: Quality) -> tuple[Plan, Outcome]:
    """Its plan, checked and with the facts about it, and its predicted step."""
    plan = labelled(entry)
    if isinstance(quality, ByError):
        lost = {"error": float(f"{quality.lost(plan.units):.3g}"), "error_budget": quality.budget.error}
        lost |= {"adaptive": True} if quality.budget.adaptive else {}
        plan = replace(plan, about={**plan.about, **lost})
    plan.check(shapes, world=costs.world)
    return plan, predict(plan, shapes, costs)


def _chosen(entries: Sequence[Weighed], quality: Quality) -> Weighed:
    """The fastest allowed plan; one that loses more must be faster by more than `WORTH`."""
    allowed = [entry for entry in entries if quality.allows(entry.plan.units)] or list(entries)
    allowed.sort(key=lambda entry: quality.lost(entry.plan.units))
    chosen = allowed[0]
    for candidate in allowed[1:]:
        if candidate.step < chosen.step * (1 - WORTH):
            chosen = candidate
    return chosen


def _contender(
    chosen: Weighed, entries: Sequence[Weighed], shapes: Sequence[Shape], costs: Costs, quality: ByError
) -> Choice | None:
    """The fastest of the allowed plans that lose more than the chosen one, send much less, and are about as fast."""
    by_name = {shape.name: shape for shape in shapes}

    def wire(entry: Weighed) -> float:
        return sum(wire_seconds(unit, by_name, costs) for unit in entry.plan.units)

    lost, sent, latest = quality.lost(chosen.plan.units), wire(chosen), chosen.step * (1 + NEAR)
    compute = costs.data + costs.forward + costs.backward
    if not sent or compute >= chosen.step * (1 - WORTH):
        return None  # fewer bytes cannot gain what it must gain
    found = [
        entry
        for entry in entries
        if entry.step <= latest
        and quality.allows(entry.plan.units)
        and quality.lost(entry.plan.units) > lost
        and wire(entry) <= LIGHT * sent
    ]
    if not found:
        return None
    entry = min(found, key=lambda one: one.step)
    plan, outcome = _finished(entry, shapes, costs, quality)
    why = f"{entry.name} was predicted at {_ms(entry.step)}, with {wire(entry) / sent:.0%} of the time on the network"
    return Choice(plan, entry.step, outcome.bound, (), why)


def _frontier(
    best: Sequence[Weighed], shapes: Sequence[Shape], costs: Costs, names: Sequence[str], quality: ByError
) -> tuple[FrontierPoint, ...]:
    """The fastest plan inside each of several error budgets: of one codec, or with the budget spent unit by unit."""
    # Units as the fastest plan of all has them, and as the fastest allowed one has them.
    coarse = [min(best, key=lambda e: e.step).plan, _chosen(best, quality).plan]
    by_name = {shape.name: shape for shape in shapes}

    def allowed(module: Unit) -> tuple[str, ...]:
        return tuple(name for name in names if quality.budget.allows_unit(replace(module, codec=name), quality.errors))

    # A module on which a codec fails must not keep its neighbours from using it.
    bases = {plan.hash: plan for base in coarse for plan in (base, split_where(base, by_name, allowed))}
    points: list[FrontierPoint] = []
    for level in quality.levels():
        found = [entry for entry in best if level.allows(entry.plan.units)]
        found += [_named(point.plan, point.step) for point in points[-1:]]
        for base in bases.values():
            plan = within_budget(base, shapes, costs, names, level)
            if level.allows(plan.units) and all(plan.hash != entry.plan.hash for entry in found):
                ordered = reorder(plan, shapes, costs, launches=QUICK // 4)
                found.append(_named(ordered.plan, ordered.step))
        if found:
            fastest = min(found, key=lambda entry: entry.step)
            lost = quality.lost(fastest.plan.units)
            points.append(FrontierPoint(level.budget.error, lost, fastest.step, fastest.plan))
    return tuple(points)


def _tried_one_by_one(
    entry: Weighed, shapes: Sequence[Shape], costs: Costs, names: Sequence[str], quality: Quality
) -> Weighed:
    """The plan with other allowed codecs for some of the largest units, where that shortens the step."""
    plan, step = mix_codecs(entry.plan, entry.step, shapes, costs, names, quality)
    found = reorder(plan, shapes, costs, launches=QUICK)
    if found.step < step:
        plan, step = found.plan, found.step
    worth = WORTH if quality.lost(plan.units) > quality.lost(entry.plan.units) else ANY
    return _named(plan, step) if step < entry.step * (1 - worth) else entry


def _named(plan: Plan, step: float) -> Weighed:
    """A plan with the name of its codec, or `mixed`."""
    used = {unit.codec for unit in plan.units}
    return Weighed("mixed" if len(used) > 1 else used.pop(), plan, step)


def reorder(plan: Plan, shapes: Sequence[Shape], costs: Costs, *, launches: int = LONG) -> Weighed:
    """The same units in the best launch order that the search finds."""
    order, step = arrange(scenario(plan, shapes, costs), launches=launches, steady=launches >= LONG)
    return Weighed("", replace(plan, order=renumber_parts([plan.order[i] for i in order])), step)


def labelled(entry: Weighed) -> Plan:
    """Its plan, with the codec and the predicted step among the plan's facts."""
    return replace(entry.plan, about={"predicted_ms": round(entry.step * 1e3, 3), "chosen": entry.name})


def candidates(
    units: Sequence[tuple[Unit, ...]], shapes: Sequence[Shape], costs: Costs, codec: str, *, launches: float = math.inf
) -> list[tuple[float, int, Plan]]:
    """All plans with this codec for all units, in greedy order: (step, number, plan), fastest first.

    Plans with more than `launches` launches are skipped, unless each of their units has only one.
    """
    by_name = {shape.name: shape for shape in shapes}
    looked: list[tuple[float, int, Plan]] = []
    for grouping in units:
        for plan in plans(grouping, by_name, costs, codec):
            if len(plan.order) > max(launches, len(plan.units)):
                continue
            base = scenario(plan, shapes, costs)
            looked.append((simulate(base.ordered(greedy_launch_order(base))).step, len(looked), plan))
    return sorted(looked)


def _best_of(
    looked: Sequence[tuple[float, int, Plan]], shapes: Sequence[Shape], costs: Costs, codec: str, *, far: bool
) -> Weighed:
    """The best of the fastest plans, each in its best order. `far`: this codec will not be chosen, so search less."""
    tried = [plan for _, _, plan in looked[: 1 if far else LOOKED]]
    ordered = [reorder(plan, shapes, costs, launches=QUICK // 4 if far else QUICK) for plan in tried]
    return replace(min(ordered, key=lambda entry: entry.step), name=codec)


def _improved(entry: Weighed, shapes: Sequence[Shape], costs: Costs) -> Weighed:
    """Improve a plan: join and split units, change the number of parts of the largest, and search the order again."""
    by_name = {shape.name: shape for shape in shapes}
    for _ in range(REGROUPED):
        tried = [
            (_greedy_step(plan, shapes, costs), n, plan) for n, plan in enumerate(regroupings(entry.plan, by_name))
        ]
        if not tried or min(tried)[0] >= entry.step * (1 + SLACK):
            break
        found = reorder(min(tried)[2], shapes, costs, launches=QUICK)
        if found.step >= entry.step * (1 - ANY):
            break
        entry = replace(found, name=entry.name)
    largest = sorted(entry.plan.units, key=lambda u: (-wire_seconds(u, by_name, costs), u.name))[:4]
    for unit in largest:
        for count in dict.fromkeys((unit.partitions * 2, max(1, unit.partitions // 2))):
            parts = part_count(unit, by_name, count)
            if parts == unit.partitions:
                continue
            trial = with_units(entry.plan, {unit.name: replace(unit, partitions=parts)})
            found = reorder(trial, shapes, costs, launches=QUICK // 2)
            if found.step < entry.step * (1 - ANY):
                entry = replace(found, name=entry.name)
    found = reorder(entry.plan, shapes, costs)
    return replace(found, name=entry.name) if found.step < entry.step * (1 + SLACK) else entry


def _greedy_step(plan: Plan, shapes: Sequence[Shape], costs: Costs) -> float:
    base = scenario(plan, shapes, costs)
    return min(simulate(base).step, simulate(base.ordered(greedy_launch_order(base))).step)


def _mixture(chosen: Weighed, shapes: Sequence[Shape], costs: Costs, names: Sequence[str], quality: Quality) -> Weighed:
    """The chosen plan with other codecs for some units: SeCoPa's rule first, then one unit at a time."""
    plan, step = chosen.plan, chosen.step
    ordered = reorder(fastest_alone(plan, shapes, costs, names), shapes, costs, launches=QUICK)
    if ordered.step < step:
        plan, step = ordered.plan, ordered.step
    plan, step = mix_codecs(plan, step, shapes, costs, names, quality)
    found = reorder(plan, shapes, costs, launches=QUICK)
    if found.step < step:
        plan, step = found.plan, found.step
    return _named(plan, step)


def _why(chosen: Weighed, weighed: Sequence[Weighed], costs: Costs, outcome: Outcome, quality: Quality) -> str:
    compute = costs.data + costs.forward + costs.backward
    others = [entry for entry in weighed if entry.name != chosen.name]
    dense = next((entry for entry in others if entry.name == "none"), None)
    parts = [f"{chosen.name}: {_ms(chosen.step)} a step"]
    if chosen.name == "none":
        parts = [f"do not compress: dense is predicted at {_ms(chosen.step)} a step"]
    elif dense is not None:
        parts[0] += f" against {_ms(dense.step)} dense"
    runner_up = next((entry for entry in others if entry is not dense), None)
    if runner_up is not None:
        faster = ", too little gained for what it loses" if runner_up.step < chosen.step else ""
        if not quality.allows(runner_up.plan.units):
            faster = ", which loses more than the error budget"
        parts.append(f"next best {runner_up.name} with {_ms(runner_up.step)}{faster}")
    parts.append(
        f"compute {_ms(compute)}, wire {_ms(outcome.wire)}" + (f", host {_ms(outcome.host)}" if outcome.host else "")
    )
    if isinstance(quality, ByError):
        parts.append(f"error {quality.lost(chosen.plan.units):.2g} of a budget of {quality.budget.error:g}")
    return "; ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
