"""When a job is planned again: pure logic, fed with the results of windows and probes."""

import random
from collections.abc import Iterable, Sequence

import pytest

from syncline.engine.tuning.drift import AGREE, DRIFT, PROBE_SHARE, WINDOW, Drift, Gauge


class Job:
    """A job without ranks: replays windows, probes where asked to, and plans when a cause is found."""

    def __init__(self, network: float = 0.05, cost: float = 0.1) -> None:
        self.network, self.cost, self.same = network, cost, False
        self.drift = Drift()
        self.drift.planned(network)
        self.window = 0
        self.probes: list[int] = []
        self.plans: list[tuple[int, str]] = []

    def see(self, steps: Iterable[float]) -> "Job":
        for step in steps:
            self.window += 1
            if self.drift.add_window(step):
                self.probes.append(self.window)
                cause = self.drift.add_probe(self.network, cost=self.cost)
                if cause is not None:
                    self.plans.append((self.window, cause))
                    self.drift.planned(self.network, same=self.same)
        return self


def test_a_steady_job_is_not_planned_again() -> None:
    random.seed(0)
    assert Job().see(0.1 * random.uniform(1 - DRIFT / 2, 1 + DRIFT / 2) for _ in range(1000)).plans == []


@pytest.mark.parametrize("mixed", [0.1, 0.13, 0.15, 0.17, 0.2])
def test_a_change_in_the_middle_of_a_window_is_one_plan(mixed: float) -> None:
    job = Job().see([0.1] * 3)
    job.network *= 2
    job.see([mixed] + [0.2] * 50)
    ((window, cause),) = job.plans
    assert cause == "link"
    assert window <= 6, "two whole windows after the mixed one"


def test_one_bad_window_is_no_drift() -> None:
    job = Job().see([0.1] * 3 + [0.5] + [0.1] * 3 + [0.05] + [0.1] * 20)
    assert job.plans == []


def test_a_slower_step_on_the_same_link_is_compute() -> None:
    assert Job().see([0.1] * 3 + [0.15] * 20).plans == [(5, "compute")]
    assert Job().see([0.1] * 3 + [0.06] * 20).plans == [(5, "compute")]


def test_many_small_drifts_add_up() -> None:
    job = Job().see(0.1 * 1.02**k for k in range(20))
    assert len(job.plans) == 1


def test_a_drift_whose_windows_disagree_is_planned_for_after_more_windows() -> None:
    steps = [0.2, 0.2 * (1 + 2 * AGREE)] * 10
    job = Job().see([0.1, *steps])
    assert job.plans[0] == (5, "compute")


def test_a_link_that_changes_while_compute_hides_it_is_seen_by_the_probe() -> None:
    """The step takes as long as before, but a faster link would allow a codec of better quality."""
    job = Job(cost=0.01).see([0.1] * 30)
    assert job.plans == []
    job.network /= 4
    job.see([0.1] * 50)
    ((window, cause),) = job.plans
    assert cause == "link"
    assert window <= 30 + 10 + 2


def test_a_link_that_changes_before_the_first_window_is_over_is_seen() -> None:
    job = Job()
    job.network *= 2
    job.see([0.2] * 30)
    assert job.plans == [(2, "link")]


def test_a_link_that_hardly_matters_is_ignored() -> None:
    job = Job(network=0.001, cost=0.0001).see([0.1] * 5)
    job.network *= 5
    assert job.see([0.1] * 50).plans == []


def test_probes_cost_a_thousandth() -> None:
    for cost in (1e-4, 0.02, 0.3):
        job = Job(cost=cost).see([0.1] * 5000)
        assert len(job.probes) >= 2
        # The first one, right after the plan, is a part of the plan's cost.
        assert cost * (len(job.probes) - 1) <= PROBE_SHARE * 5000 * WINDOW * 0.1


def test_planning_that_does_not_help_becomes_rare() -> None:
    job = Job()
    job.same = True
    job.see([0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2] * 100)
    assert 1 <= len(job.plans) <= 6
    steady = Job()
    steady.same = True
    assert len(steady.see([0.1] * 5 + [0.2] * 200).plans) == 1, "the new time is the baseline from then on"


@pytest.mark.parametrize(
    ("readings", "drifted"), [([1, 1.2, 1.2], False), ([1, 2], False), ([1, 2, 2.1], True), ([1, 2, 1, 2], False)]
)
def test_a_gauge(readings: Sequence[float], drifted: bool) -> None:
    gauge = Gauge()
    for reading in readings:
        gauge = gauge.read(reading)
    assert gauge.drifted(2) is drifted
