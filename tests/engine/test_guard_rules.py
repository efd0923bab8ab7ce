"""Rules of the guard of codec errors: pure logic, fed with readings."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.engine.tuning.guard_rules import PATIENCE, GuardRules, Reading
from syncline.plan.errors import Budget

LIMIT = 0.01


def guarded(**units: float) -> GuardRules:
    """Rules of units with these weights, planned at a tenth of the budget."""
    rules = GuardRules(Budget(LIMIT))
    rules.planned({name: (weight, LIMIT / 10) for name, weight in units.items()})
    return rules


def test_readings_inside_the_budget_change_nothing() -> None:
    rules = guarded(a=0.5, b=0.5)
    for _ in range(100):
        assert rules.read({"a": Reading(LIMIT, energy=2.0), "b": Reading(0.0)}, rate=0.1) == {}
    assert rules.forward == ["a", "b"]


def test_a_reading_far_beyond_a_limit_counts_at_once_and_one_just_beyond_if_it_is_repeated() -> None:
    rules = guarded(a=0.01, b=0.01)
    unit = rules.budget.unit
    assert list(rules.read({"a": Reading(2.1 * unit), "b": Reading(1.1 * unit)})) == ["a"]
    assert rules.suspects() == ["b"]
    assert rules.read({"b": Reading(0.9 * unit)}) == {}
    assert rules.suspects() == []
    assert rules.read({"b": Reading(1.1 * unit)}) == {}
    assert "may lose" in rules.read({"b": Reading(1.1 * unit)})["b"]
    assert rules.forward == []


def test_a_total_beyond_the_budget_takes_back_the_units_that_lose_most() -> None:
    rules = guarded(a=0.6, b=0.3, c=0.1)
    errors = {"a": Reading(0.02), "b": Reading(0.02), "c": Reading(0.001)}
    assert rules.read(errors) == {}, "it may be noise"
    back = rules.read(errors)
    assert list(back) == ["a"]
    assert "the budget" in back["a"]
    assert rules.total <= LIMIT


def test_critical_phases_take_units_back() -> None:
    rules = guarded(a=0.5, b=0.5)
    calm = {"a": Reading(0.0, energy=1.0), "b": Reading(0.0, energy=1.0)}
    rules.read(calm, rate=0.1)
    assert list(rules.read({"a": Reading(0.0, energy=30.0)}, rate=0.1)) == ["a"]
    assert "norm" not in rules.read({"b": Reading(0.0, energy=2.0)}, rate=0.12)
    back = rules.read({}, rate=0.01)
    assert list(back) == ["b"]
    assert "learning rate changed from 0.12 to 0.01" in back["b"]


def test_numbers_that_are_none_are_no_readings() -> None:
    rules = guarded(a=1.0)
    assert rules.read({"a": Reading(math.nan), "unknown": Reading(9.0)}, rate=math.nan) == {}
    assert rules.read({"a": Reading(math.inf)}, rate=0.0) == {}
    assert rules.forward == ["a"]


def test_units_wait_twice_as_long_every_time() -> None:
    rules, waited = guarded(a=1.0), []
    for _ in range(4):
        assert rules.read({"a": Reading(1.0)})
        checks = 1
        while not rules.due():
            checks += 1
        waited.append(checks)
        rules.measured({"a": 0.0}, stay=[])
    assert waited == [PATIENCE * 2**k for k in range(4)]


def test_units_of_an_earlier_run_are_measured_before_they_are_used() -> None:
    rules = GuardRules(Budget(LIMIT))
    rules.planned({"a": (1.0, 0.0)}, verified=False)
    assert rules.forward == []
    assert rules.due() == ["a"]
    rules.measured({"a": 0.001}, stay=[])
    assert rules.forward == ["a"]


EVENT = st.tuples(st.floats(0, 1), st.floats(1e-3, 1e3), st.booleans(), st.sampled_from([0.1, 0.1, 0.01]))


@settings(deadline=None, max_examples=60)
@given(st.lists(EVENT, min_size=1, max_size=400))
def test_whatever_is_read_the_guard_does_not_oscillate(events: list[tuple[float, float, bool, float]]) -> None:
    rules, flips = guarded(a=1.0), 0
    for error, energy, fits, rate in events:
        due = rules.due()
        if due:
            rules.measured({"a": 0.0} if fits else {}, stay=[] if fits else ["a"])
            flips += fits
        else:
            flips += len(rules.read({"a": Reading(error, energy=energy)} if rules.forward else {}, rate=rate))
        assert rules.total <= max(1.0, LIMIT)
    # Back after b checks and forward after 2, 4, 8... of them: twice the logarithm of the number of checks.
    assert flips <= 2 * (math.log2(len(events) / PATIENCE + 1) + 1)


def test_patience_is_kept_with_the_next_plan() -> None:
    rules = guarded(a=1.0)
    rules.read({"a": Reading(1.0)})
    rules.planned({"a": (1.0, 0.0)})
    rules.read({"a": Reading(1.0)})
    assert rules.units["a"].wait == 2 * PATIENCE
    assert rules.units["a"].wait == pytest.approx(4)
