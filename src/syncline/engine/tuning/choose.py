"""The choice of a plan: the search on rank 0, and its result on every rank."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from syncline.codecs import Codec
from syncline.engine.process_groups import Groups
from syncline.engine.protocols import TunableEngine
from syncline.errors import UsageError
from syncline.plan.auto_spec import Auto
from syncline.plan.costs import Costs
from syncline.plan.errors import Errors
from syncline.plan.file import parse, text_of
from syncline.plan.frozen_parameters import ordered_as, trained, whole
from syncline.plan.planner import WORTH, Choice, reorder, search
from syncline.plan.predict import built, exchanges_to_weigh, predict
from syncline.plan.table import Plan
from syncline.plan.unit import Shape


class PlanChooser:
    """Finds the best plan for measured costs; with `automatic=None` the codecs stay and only the launches change."""

    def __init__(self, engine: TunableEngine, automatic: Auto | None, overlap: Plan) -> None:
        """`overlap`: the plan for our own executor before anything is measured."""
        self._engine, self._automatic = engine, automatic
        self.overlap = overlap
        """The last plan for our own executor: in use, or in reserve while torch's reducer runs."""
        self._joined: tuple[str, Plan] | None = None
        """Hash of a plan whose units were joined, and the plan before, whose units may come back. On rank 0."""

    def choose(self, costs: Costs, shapes: Sequence[Shape], errors: Errors | None = None) -> Choice:
        """The plan for parameters of these shapes. Only rank 0 searches, since ranks may share cores."""
        choice = from_rank_0(self._engine.groups, lambda: self.search(costs, shapes, errors))
        self.overlap = choice.plan
        return choice

    def search(self, costs: Costs, shapes: Sequence[Shape], errors: Errors | None = None) -> Choice:
        """The search itself; it takes no part in any communication."""
        engine, auto = self._engine, self._automatic
        if auto is not None and not engine.fell_back:
            choice = search(shapes, costs, allowed=auto.codecs, errors=errors, budget=auto.budget)
            other = choice.contender
            if other is not None:
                other = replace(other, plan=whole(other.plan, engine.shapes))
            return replace(choice, plan=whole(choice.plan, engine.shapes), contender=other)
        before = self.overlap if engine.plan.executor == "reducer" else engine.plan
        if self._joined is not None and self._joined[0] == before.hash:
            before = self._joined[1]
        found = reorder(trained(before, shapes), shapes, costs)
        told = predict(found.plan, shapes, costs)
        # A GPU's host, or the cores of a CPU, may have too much to do with so many launches.
        crowded = told.host >= found.step or costs.contention >= 1
        fewer = _in_fewer_launches(before, costs, shapes) if crowded else None
        if fewer is not None and fewer.step < found.step * (1 - WORTH):
            taken = f"take the host {told.host * 1e3:.1f} ms" if told.host else f"need {found.step * 1e3:.1f} ms"
            why = (
                f"{len(found.plan.order)} launches would {taken} per step: {len(fewer.plan.order)} larger ones are"
                f" predicted at {fewer.step * 1e3:.1f} ms"
            )
            engine.say(f"step {engine.step}: {why}")
            kind = fewer.plan.units[0]
            plan = whole(fewer.plan, engine.shapes, codec=kind.codec, exchange=kind.exchange)
            self._joined = plan.hash, before
            return replace(fewer, plan=plan, why=why)
        why = f"launches ordered for a step of {found.step * 1e3:.1f} ms (bound {told.bound * 1e3:.1f} ms)"
        return Choice(ordered_as(before, found.plan), found.step, told.bound, (found,), why)


def _in_fewer_launches(plan: Plan, costs: Costs, shapes: Sequence[Shape]) -> Choice | None:
    """The same codec in larger units, for a host that cannot feed the GPU so many launches.

    None if units have different codecs, or if their codec treats a value differently in another unit.
    """
    kinds = {(unit.codec, unit.exchange) for unit in plan.units}
    codec, pattern = min(kinds)
    if len(kinds) > 1 or exchanges_to_weigh(codec, costs.world) != (pattern,) or not _independent_of_unit(built(codec)):
        return None
    # The exchange stays as well: without nodes of several ranks, no other one is weighed.
    return search(shapes, replace(costs, node=1), allowed=[codec], always=(), mix=False)


def _independent_of_unit(codec: Codec) -> bool:
    """Whether each value, or each matrix, is coded on its own, whatever else is in its unit."""
    alone = codec.view == "matrix" or codec.definition.name in ("none", "bf16", "fp16")
    return alone and (codec.tail is None or codec.tail.adds)


def from_rank_0(groups: Groups, find: Callable[[], Choice]) -> Choice:
    """The result of `find` on rank 0, without the other plans but the contender; an error is raised on every rank."""
    error: Exception | None = None
    text, choice = "", None
    if groups.rank == 0:
        try:
            choice = find()
            text = json.dumps(_packed(choice))
        except Exception as failure:
            error, text = failure, json.dumps({"error": f"{type(failure).__name__}: {failure}"})
    text = groups.text_of_rank_0(text)
    if error is not None:
        raise error
    if choice is not None:
        return choice
    received = json.loads(text)
    if "error" in received:
        raise UsageError(f"rank {groups.ranks[0]} found no plan: {received['error']}")
    return _unpacked(received)


def _packed(choice: Choice) -> dict[str, Any]:
    """What the other ranks need of it, as JSON."""
    other = choice.contender
    facts = {"step": choice.step, "bound": choice.bound, "why": choice.why, "plan": text_of(choice.plan)}
    return facts if other is None else {**facts, "contender": _packed(other)}


def _unpacked(received: Mapping[str, Any]) -> Choice:
    found = Choice(parse(received["plan"]), received["step"], received["bound"], (), received["why"])
    other = received.get("contender")
    return found if other is None else replace(found, contender=_unpacked(other))
