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
        assert rules.read({"a": Reading(LIMIT, energy=2.0), "b": Reading(0.0)}) == {}
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


def test_a_unit_that_stepped_back_counts_as_far_as_it_is_read() -> None:
    rules = guarded(a=0.5, b=0.5)
    assert list(rules.read({"a": Reading(1.0)})) == ["a"]
    assert rules.total == pytest.approx(0.5 * LIMIT / 10), "its better codec has not been read yet"
    back = rules.read({"a": Reading(2.5 * LIMIT)})
    assert "the error of all gradients" in back["a"], "inside its own limit, beyond that of all: still better, please"
    assert rules.total <= LIMIT
    assert rules.forward == ["b"]


def test_critical_phases_take_units_back() -> None:
    rules = guarded(a=0.5, b=0.5)
    calm = {"a": Reading(0.0, energy=1.0), "b": Reading(0.0, energy=1.0)}
    rules.read(calm)
    assert list(rules.read({"a": Reading(0.0, energy=30.0)})) == ["a"]
    assert "norm" not in rules.read({"b": Reading(0.0, energy=2.0)}, jump=1.5)
    back = rules.read({}, jump=10.0)
    assert list(back) == ["b"]
    assert "learning rate changed by a factor of 10 in one step" in back["b"]


def test_numbers_that_are_none_are_no_readings() -> None:
    rules = guarded(a=1.0)
    assert rules.read({"a": Reading(math.nan), "unknown": Reading(9.0)}, jump=math.nan) == {}
    assert rules.read({"a": Reading(math.inf)}, jump=0.0) == {}
    assert rules.forward == ["a"]


def test_units_wait_twice_as_long_every_time() -> None:
    rules, waited = guarded(a=1.0), []
    for _ in range(4):
        assert rules.read({"a": Reading(1.0)})
        checks = 1
        while not rules.due():
            checks += 1
        waited.append(checks)
        rules.measured({"a": (1.0, 0.0)}, stay=[])
    assert waited == [PATIENCE * 2**k for k in range(4)]


def test_units_of_an_earlier_run_are_measured_before_they_are_used() -> None:
    rules = GuardRules(Budget(LIMIT))
    rules.planned({"a": (1.0, 0.0)}, verified=False)
    assert rules.forward == []
    assert rules.due() == ["a"]
    rules.measured({"a": (1.0, 0.001)}, stay=[])
    assert rules.forward == ["a"]


def test_lost_values_count_with_adaptive_optimizers_only() -> None:
    lost = Reading(0.0, lost_values=0.9)
    assert guarded(a=1.0).read({"a": lost}) == {}
    rules = GuardRules(Budget(0.001, adaptive=True))
    rules.planned({"a": (0.5, 0.0), "b": (0.5, 0.0)})
    back = rules.read({"a": lost, "b": Reading(0.0, lost_values=0.15)})
    assert back == {"a": "90% of its values are lost, and 10% may be"}
    assert rules.suspects() == ["b"]
    assert list(rules.read({"b": Reading(0.0, lost_values=0.15)})) == ["b"]


def test_units_that_could_not_be_measured_wait_and_come_forward_with_their_weight() -> None:
    rules = GuardRules(Budget(LIMIT))
    rules.planned({"a": (1.0, 0.0)}, later=["b"])
    assert rules.forward == ["a"]
    assert [rules.due() for _ in range(PATIENCE)] == [[]] * (PATIENCE - 1) + [["b"]]
    rules.measured({"b": (0.5, 0.004)}, stay=[])
    assert rules.total == pytest.approx(0.002)


UNITS = ("a", "b", "c")
VALUE = st.one_of(st.floats(0, 1), st.sampled_from([0.0, LIMIT, 2 * LIMIT, math.nan, math.inf]))
READING = st.builds(Reading, VALUE, st.floats(1e-3, 1e3), VALUE)
READINGS = st.fixed_dictionaries({}, optional=dict.fromkeys(UNITS, READING))
EVENT = st.tuples(READINGS, st.sets(st.sampled_from(UNITS)), st.sampled_from([1.0, 1.0, 10.0, math.nan]), st.booleans())


@settings(deadline=None, max_examples=80)
@given(st.lists(EVENT, min_size=1, max_size=200), st.booleans())
def test_whatever_is_read_the_guard_does_not_oscillate(
    events: list[tuple[dict[str, Reading], set[str], float, bool]], adaptive: bool
) -> None:
    budget = Budget(LIMIT / 2, adaptive=adaptive)
    rules, flips = GuardRules(budget), dict.fromkeys(UNITS, 0)
    plan = dict.fromkeys(UNITS, (1 / 3, 0.0))
    rules.planned(plan)
    for readings, fits, jump, planned in events:
        if planned and len(rules.forward) == len(UNITS):
            rules.planned(plan)  # the tuner plans again: what was learnt about patience stays
        if due := rules.due():
            rules.measured({n: (1 / 3, 0.0) for n in due if n in fits}, stay=[n for n in due if n not in fits])
            came = [name for name in due if name in fits]
        else:
            used = {name: reading for name, reading in readings.items() if name in rules.forward}
            came = list(back := rules.read(used, jump=jump))
            for name, reading in used.items():
                values = (reading.error, reading.energy, reading.lost_values)
                if all(map(math.isfinite, values)) and reading.error > 2 * budget.unit:
                    assert name in back, "one reading far beyond its limit is enough"
            assert rules.total <= 2 * budget.error, "never far beyond the budget after a check"
        for name in came:
            flips[name] += 1
    # Back after b checks and forward after 2, 4, 8... of them: twice the logarithm of the number of checks.
    for count in flips.values():
        assert count <= 2 * (math.log2(len(events) / PATIENCE + 1) + 1)


def test_patience_is_kept_with_the_next_plan() -> None:
    rules = guarded(a=1.0)
    rules.read({"a": Reading(1.0)})
    rules.planned({"a": (1.0, 0.0)})
    rules.read({"a": Reading(1.0)})
    assert rules.units["a"].wait == 2 * PATIENCE
    assert rules.units["a"].wait == pytest.approx(4)
