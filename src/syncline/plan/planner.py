"""The planner: of many plans, the one whose simulated step is shortest. It may well answer: do not compress.

For every codec that is allowed it weighs groupings and partitions, orders launches greedily by measured times and then
moves units in the order; then it tries other codecs unit by unit, beginning with SeCoPa's rule (compress where encode,
fewer bytes and decode together take less than the bytes as they are).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from syncline import codecs, exchange
from syncline.plan.costs import CodecCost, Costs
from syncline.plan.default import default_plan
from syncline.plan.order import greedy_order
from syncline.plan.predict import predict, scenario
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit
from syncline.sim import Scenario, simulate

GROUPS = (1 << 18, 1 << 20, 4 << 20)
PARTS = (2 << 20, 8 << 20, 1 << 40)
ALWAYS = ("none", "bf16")
"""Candidates that are always weighed."""
WORTH = 0.03
"""A lossier choice must be predicted to be faster by more than this share."""


@dataclass(frozen=True)
class Weighed:
    """A plan that was looked at, with its predicted step."""

    name: str
    plan: Plan
    step: float


@dataclass(frozen=True)
class Choice:
    """The planner's answer: the plan, what it predicts, the best plan of every kind that it weighed, and why."""

    plan: Plan
    step: float
    bound: float
    alternatives: tuple[Weighed, ...]
    why: str


def search(shapes: Sequence[Shape], costs: Costs, *, allowed: Sequence[str] = (), mix: bool = True) -> Choice:
    """The best plan under these costs. `allowed` are lossy codecs that may be chosen, best quality first."""
    names = list(dict.fromkeys([*ALWAYS, *allowed]))
    best = [_best_of(shapes, costs, name) for name in names]
    chosen = best[0]
    for candidate in best[1:]:
        if candidate.step < chosen.step * (1 - WORTH):
            chosen = candidate
    if mix and len(names) > 1:
        mixed = _mix(chosen, shapes, costs, names)
        best.append(mixed)
        if mixed.step < chosen.step * (1 - WORTH):
            chosen = mixed
    plan = replace(chosen.plan, about={"predicted_ms": round(chosen.step * 1e3, 3), "chosen": chosen.name})
    outcome = predict(plan, shapes, costs)
    return Choice(plan, chosen.step, outcome.bound, tuple(best), _why(chosen, best, costs, outcome.wire))


def reorder(plan: Plan, shapes: Sequence[Shape], costs: Costs) -> Weighed:
    """The same units in the best order that is found."""
    base = scenario(plan, shapes, costs)
    start = list(range(len(base.jobs)))
    greedy = _greedy(base)
    orders = [start, greedy, _by_ready(base), *_deferred(base, greedy)]
    steps = [(simulate(base.ordered(order)).step, n) for n, order in enumerate(orders)]
    step, at = min(steps)
    order, step = _improve(base, orders[at], step)
    return Weighed("", replace(plan, order=tuple(plan.order[i] for i in order)), step)


def secopa(unit: Unit, shapes: Sequence[Shape], costs: Costs, codec: str) -> tuple[float, float]:
    """SeCoPa's two times of a unit by itself: as it is, and compressed with `codec`."""
    mine = [shape for shape in shapes if shape.name in unit.parameters]
    values = sum(shape.values for shape in mine)

    def alone(name: str) -> float:
        carrier = exchange.build(exchange.legal(name)[0])
        built = codecs.build(name)
        sent = sum(built.wire_bytes(shape.shape, shape.dtype, costs.world, carrier) for shape in mine)
        cost = costs.codecs.get(name, CodecCost())
        rounds = len(built.rounds(mine[0].shape))
        codec_s = cost.encode(values) + cost.between(values) * (rounds - 1) + cost.decode(values)
        return rounds * costs.link.latency + sent / costs.link.bytes_per_s + codec_s

    return alone("none"), alone(codec)


def _best_of(shapes: Sequence[Shape], costs: Costs, codec: str) -> Weighed:
    plans: dict[str, Plan] = {}
    for group in GROUPS:
        for part in PARTS:
            plan = default_plan(shapes, compress=codec, group_bytes=group, part_bytes=part)
            plans.setdefault(plan.hash, plan)
    # A quick look at all of them, a long one at the best two.
    quick = sorted(
        ((predict(_greedily(plan, shapes, costs), shapes, costs).step, h) for h, plan in plans.items()),
    )
    best = min((reorder(plans[h], shapes, costs) for _, h in quick[:2]), key=lambda w: w.step)
    return replace(best, name=codec)


def _mix(chosen: Weighed, shapes: Sequence[Shape], costs: Costs, names: Sequence[str]) -> Weighed:
    """Other codecs for single units: first by SeCoPa's rule, then the largest units one by one."""
    units = list(chosen.plan.units)
    plan, step = chosen.plan, chosen.step
    for at in sorted(range(len(units)), key=lambda i: -_values(units[i], shapes))[:12]:
        for name in names:
            if name == units[at].codec or units[at].partitions > 1:
                continue
            plain, packed = secopa(units[at], shapes, costs, name)
            if name != "none" and packed >= plain:
                continue
            trial = [*units]
            trial[at] = replace(units[at], codec=name, exchange=exchange.legal(name)[0])
            candidate = replace(plan, units=tuple(trial))
            found = predict(candidate, shapes, costs).step
            if found < step * (1 - WORTH / 3):
                units, plan, step = trial, candidate, found
    better = reorder(plan, shapes, costs)
    return replace(better, name="mixed") if better.step < step else Weighed("mixed", plan, step)


def _values(unit: Unit, shapes: Sequence[Shape]) -> int:
    wanted = set(unit.parameters)
    return sum(shape.values for shape in shapes if shape.name in wanted)


def _greedily(plan: Plan, shapes: Sequence[Shape], costs: Costs) -> Plan:
    order = _greedy(scenario(plan, shapes, costs))
    return replace(plan, order=tuple(plan.order[i] for i in order))


def _ready_times(base: Scenario) -> list[float]:
    ends, now = [0.0] * len(base.layers), 0.0
    for at in range(len(base.layers) - 1, -1, -1):
        now += base.layers[at].backward
        ends[at] = now
    return [ends[job.ready] for job in base.jobs]


def _needs(base: Scenario) -> list[int]:
    first = {unit: at for at, layer in enumerate(base.layers) for unit in layer.needs}
    return [first.get(job.unit, len(base.layers)) for job in base.jobs]


def _greedy(base: Scenario) -> list[int]:
    wire = [sum(one.wire + one.latency for one in job.rounds) for job in base.jobs]
    return greedy_order(_ready_times(base), wire, _needs(base))


def _by_ready(base: Scenario) -> list[int]:
    ready = _ready_times(base)
    return sorted(range(len(base.jobs)), key=lambda i: (ready[i], -_needs(base)[i]))


def _deferred(base: Scenario, order: Sequence[int]) -> Iterator[list[int]]:
    """First in, first out but for the k units that are needed last: those go after everything else."""
    fifo, needs = _by_ready(base), _needs(base)
    late = sorted({needs[i] for i in fifo}, reverse=True)
    for count in range(1, min(6, len(late))):
        last = set(late[:count])
        yield [i for i in fifo if needs[i] not in last] + sorted(
            (i for i in fifo if needs[i] in last), key=lambda i: needs[i]
        )


def _improve(base: Scenario, order: list[int], step: float, *, rounds: int = 2) -> tuple[list[int], float]:
    """Move one unit's launches to other places as long as that helps."""
    units = sorted({job.unit for job in base.jobs}, key=lambda u: -_wire_of(base, u))[:16]
    for _ in range(rounds):
        before = step
        for unit in units:
            mine = [i for i in order if base.jobs[i].unit == unit]
            rest = [i for i in order if base.jobs[i].unit != unit]
            stride = max(1, len(rest) // 12)
            for at in [*range(0, len(rest), stride), len(rest)]:
                trial = rest[:at] + mine + rest[at:]
                found = simulate(base.ordered(trial)).step
                if found < step * (1 - 1e-6):
                    order, step = trial, found
        if step > before * (1 - 1e-3):
            break
    return order, step


def _wire_of(base: Scenario, unit: int) -> float:
    return sum(one.wire for job in base.jobs if job.unit == unit for one in job.rounds)


def _why(chosen: Weighed, best: Sequence[Weighed], costs: Costs, wire: float) -> str:
    dense = best[0]
    compute = costs.data + costs.forward + costs.backward + costs.tail
    if chosen.name == "none":
        lossy = min(best[1:], key=lambda w: w.step, default=None)
        saved = "" if lossy is None else f" ({lossy.name} would take {lossy.step * 1e3:.1f} ms)"
        return (
            f"do not compress: dense is predicted at {dense.step * 1e3:.1f} ms a step, of which {compute * 1e3:.1f} ms"
            f" is compute{saved}"
        )
    return (
        f"{chosen.name}: {chosen.step * 1e3:.1f} ms a step against {dense.step * 1e3:.1f} ms dense;"
        f" compute {compute * 1e3:.1f} ms, wire {wire * 1e3:.1f} ms"
    )
