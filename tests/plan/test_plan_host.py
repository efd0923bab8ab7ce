"""Host time to feed a GPU: measured in profiled steps, and predicted as measured."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cost_cases import costs
from model_shapes import mlp, resnet50
from torch import nn

from syncline.engine.launch.units import Slot
from syncline.engine.tuning.choose import PlanChooser
from syncline.engine.tuning.measure_costs import host_costs
from syncline.engine.tuning.profile import Profile, ProfileTable
from syncline.plan import CodecCost, Host, default_plan, scenario

SHORT, LONG = 0.02, 0.05


def profiled_step(profile: Profile, slot: Slot, passes: int) -> None:
    profile.touched(slot)
    for _ in range(passes):
        time.sleep(SHORT)
        profile.gradient_complete(slot)
        profile.backward_ended()
        with profile.issuing_launches():
            time.sleep(LONG)
    profile.updates_begin()
    with profile.issuing_update():
        time.sleep(LONG)
    time.sleep(SHORT)
    profile.updates_issued()
    time.sleep(LONG)  # waiting
    profile.updates_done()


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_launches_and_updates_are_counted_once(passes: int) -> None:
    parameter = nn.Parameter(torch.ones(1))
    slot = Slot("p", parameter, 0, parameter.detach())
    profile = Profile(torch.device("cpu"), [slot])
    profile.next_step()
    profiled_step(profile, slot, passes)
    profile.next_step()
    table = profile.table()
    assert table.host_launches == pytest.approx(passes * LONG, abs=SHORT)
    assert table.host_updates == pytest.approx(LONG, abs=SHORT)
    assert table.host_passes == pytest.approx((passes + 1) * SHORT, abs=SHORT), "no launches, no updates, no waiting"


def host_times(passes: float, launches: float, updates: float) -> ProfileTable:
    return ProfileTable(0, 0, 0, 0, 1, passes, launches, updates, touched=(), complete=())


@pytest.mark.parametrize("issue", [1e-4, 3e-3])
def test_a_profiled_plan_is_predicted_to_take_what_it_took(issue: float) -> None:
    shapes = resnet50()
    plan = default_plan(shapes, compress="powersgd(rank=4)")
    tried = {"powersgd(rank=4)": CodecCost(issue=issue), "int8": CodecCost(issue=2 * issue)}
    host, scaled = host_costs(plan, shapes, tried, 2, host_times(0.03, 0.05, 0.01))
    told = scenario(plan, shapes, replace(costs(shapes, 0.1), host=host, codecs=scaled))
    assert told.host == pytest.approx(0.03 + 0.05 + 0.01)
    assert scaled["int8"].issue == 2 * scaled["powersgd(rank=4)"].issue, "all were tried in the same way"
    assert scaled["powersgd(rank=4)"].issue <= issue
    assert (host.launch == 0) == (issue > 1e-3)


def test_nothing_measured_of_a_codec_is_all_of_the_launch() -> None:
    plan = default_plan(mlp())
    host, scaled = host_costs(plan, mlp(), {}, 2, host_times(0.0, 0.05, 0.01))
    assert host.launch == pytest.approx(0.05 / len(plan.order))
    assert scaled == {}


@pytest.mark.full
def test_units_that_were_joined_come_back_when_the_host_keeps_up() -> None:
    shapes = resnet50()
    first = default_plan(shapes)
    said: list[str] = []
    engine = SimpleNamespace(plan=first, shapes=shapes, step=7, say=said.append, fell_back=False)
    chooser = PlanChooser(engine, None, first)
    plain = costs(shapes, 0.04, bytes_per_s=2e9)
    slow = replace(plain, host=Host(passes=0.04, launch=6e-4, update=2e-4))
    joined = chooser.search(slow, shapes)
    assert len(joined.plan.order) < len(first.order) / 2
    assert f"{len(first.order)} launches would take the host" in joined.why
    assert said == [f"step 7: {joined.why}"]
    engine.plan = joined.plan
    again = chooser.search(plain, shapes)
    assert again.plan.units == first.units
    assert again.why.startswith("launches ordered")
    assert chooser.search(slow, shapes).plan.hash == joined.plan.hash, "and go again"
    # A plan that somebody else has set is the one to order.
    engine.plan = default_plan(shapes, group_bytes=4 << 20)
    assert chooser.search(plain, shapes).plan.units == engine.plan.units
