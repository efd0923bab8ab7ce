"""Checks that all ranks attach the same model with the same plan and options, and change to the same plan."""

from collections.abc import Mapping

from syncline.engine.process_groups import Groups
from syncline.engine.protocols import EngineView
from syncline.plan import Plan


def agree_on_job(engine: EngineView, options: Mapping[str, object]) -> None:
    """Raise on every rank unless all attach the same model in the same way."""
    frozen = ["" if slot.parameter.requires_grad else ", frozen" for slot in engine.slots]
    rows = [f"{s.name}: {s.shape} {s.dtype}{f}" for s, f in zip(engine.shapes, frozen, strict=True)]
    engine.groups.agree("\n".join(rows), "the models' parameters")
    agree_on_plan(engine.groups, engine.plan)
    engine.groups.agree("\n".join(f"{name}: {value}" for name, value in options.items()), "attach's options")


def agree_on_plan(groups: Groups, plan: Plan) -> None:
    """Raise on every rank unless all have the same plan; the hash covers what the other lines leave out."""
    rows = [f"unit {u.name}: {u.codec} over {u.exchange}, partitions {u.partitions}" for u in plan.units]
    groups.agree("\n".join([*rows, f"plan {plan.hash}"]), "plans")
