"""Plans while parameters are frozen: of what trains, and whole again."""

from pathlib import Path

import pytest
from cost_cases import costs
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shapes import layer, mlp, resnet50

from syncline.errors import UsageError
from syncline.plan import default_plan, save
from syncline.plan.frozen_parameters import ordered_as, trained, whole
from syncline.plan.run_files import COSTS, PLAN, SHAPES, load_recorded, shapes_text

MODEL = resnet50()


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(0, len(MODEL) - 1), min_size=1), st.booleans())
def test_what_trains_is_planned_and_the_rest_comes_back(live: set[int], by_weight: bool) -> None:
    full = default_plan(MODEL, part_bytes=1 << 18)
    shapes = [shape for number, shape in enumerate(MODEL) if number in live]
    part = trained(full, shapes)
    part.check(shapes)
    by_name = {unit.name: unit for unit in full.units}
    for unit in part.units:
        assert set(unit.parameters) <= set(by_name[unit.name].parameters)
    again = ordered_as(full, part)
    again.check(MODEL)
    assert again.units == full.units
    assert again.order[: len(part.order)] == part.order
    made = default_plan(shapes, group_bytes=1 << 22 if by_weight else 0)
    complete = whole(made, MODEL, codec="bf16")
    complete.check(MODEL)
    assert complete.order[: len(made.order)] == made.order
    assert trained(complete, shapes) == made
    assert {unit.codec for unit in complete.units if unit not in made.units} <= {"bf16"}


def test_nothing_frozen_changes_nothing() -> None:
    plan = default_plan(mlp())
    assert trained(plan, mlp()) == plan
    assert whole(plan, mlp()) is plan


def test_a_module_frozen_in_part_makes_two_units_of_two_names() -> None:
    shapes = [*layer("fc", (64, 64)), *layer("fc#2", (64, 64))]
    made = default_plan(shapes[1:2], group_bytes=0)
    assert [unit.name for unit in made.units] == ["fc"]
    names = [unit.name for unit in whole(made, shapes).units]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("exchange", ["allreduce", "ring"])
def test_the_rest_is_sent_as_asked(exchange: str) -> None:
    made = default_plan(mlp()[:2], exchange=exchange)
    assert {unit.exchange for unit in whole(made, mlp(), exchange=exchange).units} == {exchange}


def test_what_a_run_leaves_is_of_what_trained(tmp_path: Path) -> None:
    live, frozen = mlp()[2:], mlp()[:2]
    plan = whole(default_plan(live), mlp())
    save(plan, tmp_path / PLAN)
    (tmp_path / COSTS).write_text(costs(live, 0.1).to_json())
    (tmp_path / SHAPES).write_text(shapes_text(live, strategy="s", device="cpu", planned_at=6, frozen=frozen))
    found = load_recorded(tmp_path)
    assert list(found.shapes) == live
    assert found.plan == trained(plan, live)
    (tmp_path / SHAPES).write_text(shapes_text(live, strategy="s", device="cpu", planned_at=6))
    with pytest.raises(UsageError, match="not of one run"):
        load_recorded(tmp_path)
