"""What must hold for every scenario."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cases import TIMES, scenarios

from syncline.sim import Job, Layer, Scenario, Transfer, simulate
from syncline.trace import partition

SLACK = 1e-9


@settings(deadline=None)
@given(scenarios())
def test_between_the_bound_and_everything_in_a_row(scenario: Scenario) -> None:
    told = simulate(scenario)
    assert told.bound - SLACK <= told.step <= scenario.serial + SLACK
    assert told == simulate(scenario)


@settings(deadline=None)
@given(scenarios())
def test_spans_change_nothing_and_cover_the_step(scenario: Scenario) -> None:
    told = simulate(scenario, spans=True)
    assert told.step == pytest.approx(simulate(scenario).step)
    for step, phases in partition(told.spans).items():
        assert step in (1, 2)
        assert sum(phases.values()) == pytest.approx(told.step * 1e9, abs=2)


@settings(deadline=None)
@given(scenarios(contended=False, rival=False))
def test_without_contention_waits_are_what_is_exposed(scenario: Scenario) -> None:
    told = simulate(scenario)
    assert sum(wait.seconds for wait in told.waits) == pytest.approx(told.exposed, abs=SLACK)


@settings(deadline=None)
@given(scenarios(contended=False))
def test_a_barrier_is_never_faster(scenario: Scenario) -> None:
    with_barrier, without = (simulate(scenario.with_(rival=rival)).step for rival in (True, False))
    assert without <= with_barrier + SLACK


@settings(deadline=None)
@given(scenarios(contended=False, most_rounds=1), st.sampled_from([1.0, 1.5, 3.0]))
def test_a_faster_wire_is_never_slower_where_a_job_has_one_round(scenario: Scenario, factor: float) -> None:
    slower = tuple(
        replace(job, rounds=tuple(replace(one, wire=factor * one.wire) for one in job.rounds)) for job in scenario.jobs
    )
    fixed = scenario.with_(update=(0.0,) * len(scenario.update))
    assert simulate(fixed).step <= simulate(fixed.with_(jobs=slower)).step + SLACK


@settings(deadline=None)
@given(scenarios(contended=False, most_rounds=1), TIMES)
def test_more_lanes_and_pipelining_are_never_slower(scenario: Scenario, more: float) -> None:
    fixed = scenario.with_(update=(0.0,) * len(scenario.update), pipelined=False)
    step = simulate(fixed).step
    assert simulate(fixed.with_(lanes=fixed.lanes + int(more))).step <= step + SLACK
    assert simulate(fixed.with_(pipelined=True)).step <= step + SLACK


@settings(deadline=None)
@given(scenarios())
def test_the_unit_of_time_does_not_matter(scenario: Scenario) -> None:
    def times(value: float) -> float:
        return value / 1024

    scaled = scenario.with_(
        layers=tuple(replace(a, forward=times(a.forward), backward=times(a.backward)) for a in scenario.layers),
        jobs=tuple(
            Job(
                j.unit,
                j.ready,
                times(j.encode),
                tuple(Transfer(times(r.latency), times(r.wire)) for r in j.rounds),
                times(j.between),
                times(j.decode),
            )
            for j in scenario.jobs
        ),
        update=tuple(map(times, scenario.update)),
        data=times(scenario.data),
    )
    assert simulate(scaled).step * 1024 == pytest.approx(simulate(scenario).step, rel=1e-9)


@pytest.mark.parametrize("contention", [0.0, 0.3])
def test_a_step_of_200_units_in_400_launches_takes_milliseconds(contention: float) -> None:
    layers = tuple(Layer(f"layer{i}", 1e-3, 2e-3, (i,)) for i in range(200))
    two = (Transfer(1e-4, 1e-3), Transfer(1e-4, 5e-4))
    jobs = tuple(Job(i // 2, i // 2, 1e-4, two, 1e-4, 1e-4) for i in reversed(range(400)))
    scenario = Scenario(layers, jobs, (1e-4,) * 200, contention=contention)
    taken = []
    for _ in range(7):
        begin = time.perf_counter()
        simulate(scenario)
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 0.02  # 2 ms where this was written
