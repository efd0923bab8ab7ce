"""The simulator agrees with a reference that shares nothing with it but the scenario."""

import pytest
from reference_engine import reference_step
from sim_cases import random_scenario

from syncline.sim import Job, Layer, Scenario, Transfer, simulate


@pytest.mark.parametrize("block", range(10))
def test_the_same_step_as_five_steps_of_threads(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        scenario = random_scenario(seed)
        assert simulate(scenario).step == pytest.approx(reference_step(scenario), rel=1e-7), f"seed {seed}"


def test_the_same_as_time_in_small_steps() -> None:
    for seed in range(6):
        scenario = random_scenario(seed)
        assert simulate(scenario).step == pytest.approx(reference_step(scenario, dt=2e-3), rel=1e-7)


def test_the_reference_by_hand() -> None:
    layers = (Layer("a", 1.0, 2.0, (0,)),)
    one = Scenario(layers, (Job(0, 0, 0.5, (Transfer(0.25, 4.0),), decode=0.5),), (1.0,), data=0.5)
    assert reference_step(one) == pytest.approx(2 + 0.5 + 0.25 + 4 + 0.5 + 1 + 1)
