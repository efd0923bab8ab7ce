"""Error budgets: the knapsack against brute force, the budget's rules, the search within a budget, and `auto` specs."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
from cost_cases import costs
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shapes import mlp, vgg19

from syncline.errors import UsageError
from syncline.plan import Budget, CodecError, Errors, Shape, Unit, search
from syncline.plan.auto_spec import ADAPTIVE_CODECS, CODECS, parse_auto
from syncline.plan.errors import ADAPTIVE_ERROR, DEFAULT_ERROR, UNIT_FACTOR, errors_of
from syncline.plan.knapsack import Option, hull, spend
from syncline.plan.quality import ByError

OPTION = st.builds(Option, st.integers(0, 50).map(float), st.integers(0, 50).map(float))
UNITS = st.lists(st.lists(OPTION, min_size=1, max_size=4), min_size=1, max_size=5)


def brute_force(units: list[list[Option]], limit: float) -> float | None:
    """The least sum of seconds of all ways to choose an option for each unit within a limit."""
    ways = [way for way in product(*units) if sum(option.error for option in way) <= limit]
    return min((sum(option.seconds for option in way) for way in ways), default=None)


@settings(deadline=None, max_examples=200)
@given(UNITS, st.integers(0, 120).map(float))
def test_the_knapsack_misses_less_than_one_option_of_brute_force(units: list[list[Option]], limit: float) -> None:
    chosen = [options[n] for options, n in zip(units, spend(units, limit), strict=True)]
    best = brute_force(units, limit)
    if best is None:  # nothing fits: the least error of all
        assert sum(o.error for o in chosen) == sum(min(o.error for o in options) for options in units)
        return
    assert sum(o.error for o in chosen) <= limit
    largest = max(max(o.seconds for o in options) - min(o.seconds for o in options) for options in units)
    assert best <= sum(o.seconds for o in chosen) <= best + largest


@settings(deadline=None)
@given(st.lists(OPTION, min_size=1, max_size=6), st.floats(0.01, 100))
def test_the_best_option_for_a_price_of_errors_is_on_the_hull(options: list[Option], price: float) -> None:
    kept = [options[n] for n in hull(options)]
    assert [o.error for o in kept] == sorted({o.error for o in kept})
    best = min(o.seconds + price * o.error for o in options)
    assert min(o.seconds + price * o.error for o in kept) == pytest.approx(best)


def errors(shapes: list[Shape], lost: dict[str, float], **energy: float) -> Errors:
    """Every parameter loses the same with a codec; energies are 1 where not given."""
    table = {spec: {s.name: CodecError(2 * error, error) for s in shapes} for spec, error in lost.items()}
    return Errors({s.name: energy.get(s.name, 1.0) for s in shapes}, table)


def test_the_error_of_a_unit_and_of_a_plan_are_those_of_all_their_values_together() -> None:
    found = Errors(
        {"a": 9.0, "b": 1.0, "c": 90.0},
        {"int4": {name: CodecError(0.0, error) for name, error in {"a": 0.1, "b": 0.5, "c": 0.0}.items()}},
    )
    unit, other = Unit("u", ("a", "b"), "int4", "allgather"), Unit("v", ("c",))
    assert found.of(unit) == pytest.approx((0.9 + 0.5) / 10)
    assert found.total([unit, other]) == pytest.approx((0.9 + 0.5) / 100)
    assert found.of(Unit("u", ("a", "unknown"), "int4", "allgather")) == math.inf
    assert found.of(Unit("u", ("a",), "int8", "allgather")) == math.inf
    assert found.of(Unit("u", ("a", "unknown"), "bf16")) < 1e-5
    again = found.updated(Errors({"a": 1.0}, {"int4": {"a": CodecError(0.0, 0.5)}}))
    assert again.of(unit) == pytest.approx(0.5)
    assert again.scaled(2).of(unit) == pytest.approx(1.0)
    assert errors_of(json.loads(found.to_json())) == found


def test_a_budget_limits_the_total_and_each_unit() -> None:
    found = Errors({"a": 999.0, "b": 1.0}, {"int4": {"a": CodecError(0, 0.0), "b": CodecError(0, 0.5)}})
    large, small = Unit("a", ("a",), "int4", "allgather"), Unit("b", ("b",), "int4", "allgather")
    budget = Budget(0.01)
    assert budget.unit == UNIT_FACTOR * 0.01
    assert budget.allows([large], found)
    assert found.total([large, small]) < budget.error
    assert not budget.allows([large, small], found), "the small layer would be ruined, though the total is small"
    assert Budget(0.01, unit=0.6).allows([large, small], found)
    assert Budget(0.0).allows([Unit("a", ("a",), "bf16"), Unit("b", ("b",))], found)


def test_a_large_layer_does_not_hide_a_ruined_small_one_in_its_unit() -> None:
    table = {"a.weight": CodecError(0, 0.0), "b.weight": CodecError(0, 0.5), "b.bias": CodecError(0, 0.0)}
    found = Errors({"a.weight": 999.0, "b.weight": 1.0, "b.bias": 1.0}, {"int4": table})
    both = Unit("a..b", tuple(table), "int4", "allgather")
    assert found.of(both) < 0.001
    assert found.worst(both) == pytest.approx(0.25), "the module's, with its bias"
    budget = Budget(0.01)
    assert not budget.allows([both], found)
    assert ByError(found, budget).share(both) == math.inf
    assert Budget(0.1).allows([both], found)


def test_with_adaptive_optimizers_no_parameter_may_lose_its_small_values() -> None:
    rows = {"a.weight": CodecError(0, 1e-5, lost_values=0.6), "a.bias": CodecError(0, 1e-5)}
    found = Errors(dict.fromkeys(rows, 1.0), {"int8": rows})
    unit = Unit("a", tuple(rows), "int8", "allgather")
    assert Budget(0.001).allows([unit], found)
    assert not Budget(0.001, adaptive=True).allows([unit], found)
    assert ByError(found, Budget(0.001, adaptive=True)).share(unit) == math.inf
    assert all(level.budget.adaptive for level in ByError(found, Budget(0.001, adaptive=True)).levels())
    assert Budget(0.01, adaptive=True).allows([unit], found), "a larger budget allows more"
    assert found.scaled(2).lost_values(unit) == pytest.approx(1.2)
    assert found.lost_values(Unit("b", ("b",), "int8", "allgather")) == math.inf
    assert found.lost_values(Unit("b", ("b",), "bf16")) == 0.0


LOST = {"int8": 1e-5, "int4": 4e-3, "terngrad": 0.5}


@pytest.mark.parametrize(("error", "codec"), [(0.0, "bf16"), (1e-4, "int8"), (0.01, "int4"), (1.0, "terngrad")])
def test_the_plan_stays_inside_the_budget_and_uses_it_where_that_pays(error: float, codec: str) -> None:
    shapes = vgg19()
    measured, lost = costs(shapes, 0.03), errors(shapes, LOST)
    choice = search(shapes, measured, allowed=list(LOST), errors=lost, budget=Budget(error))
    used = {unit.codec for unit in choice.plan.units}
    assert codec in used
    assert Budget(error).allows(choice.plan.units, lost)
    assert choice.plan.about["error"] == pytest.approx(lost.total(choice.plan.units), rel=0.01)
    assert choice.plan.about["error_budget"] == error
    steps = [point.step for point in choice.frontier]
    assert steps == sorted(steps, reverse=True), "a larger budget is never slower"
    for point in choice.frontier:
        assert ByError(lost, Budget(point.limit)).allows(point.plan.units)
    inside = [point for point in choice.frontier if point.limit <= error]
    assert choice.step <= inside[-1].step * 1.04, "3% for quality, 1% for robustness"


def test_a_layer_on_which_a_codec_fails_gets_another_one() -> None:
    shapes = vgg19()
    measured, lost = costs(shapes, 0.03), errors(shapes, {"int8": 1e-5, "int4": 4e-3})
    bad = "classifier.0.weight"
    table = {spec: dict(rows) for spec, rows in lost.codecs.items()}
    table["int4"][bad] = CodecError(0.9, 0.9)
    choice = search(shapes, measured, allowed=["int8", "int4"], errors=Errors(lost.energy, table))
    codecs = {name: unit.codec for unit in choice.plan.units for name in unit.parameters}
    assert codecs[bad] == "int8"
    assert "int4" in codecs.values()


def test_a_layer_without_errors_does_not_keep_the_others_from_compressing() -> None:
    shapes = mlp()
    measured = costs(shapes, 0.001, bytes_per_s=1e6)
    lost = errors(shapes, {"int8": 1e-5})
    unknown = shapes[-1].name.rpartition(".")[0]
    rows = {name: row for name, row in lost.codecs["int8"].items() if name.rpartition(".")[0] != unknown}
    choice = search(shapes, measured, allowed=["int8"], errors=Errors(lost.energy, {"int8": rows}))
    codecs = {name: unit.codec for unit in choice.plan.units for name in unit.parameters}
    assert {name for name, codec in codecs.items() if codec == "int8"} == set(rows)


def test_codecs_that_were_not_measured_are_not_chosen() -> None:
    shapes = mlp()
    choice = search(shapes, costs(shapes, 0.001, bytes_per_s=1e6), allowed=["int8", "int4"], errors=Errors({}, {}))
    assert {unit.codec for unit in choice.plan.units} <= {"none", "bf16"}


def test_specs_of_automatic_compression() -> None:
    assert parse_auto("powersgd(rank=4)") is None
    plain, limited = parse_auto("auto"), parse_auto("auto(error=0.1)")
    assert plain is not None
    assert limited is not None
    assert (plain.codecs, plain.budget.error) == (CODECS, DEFAULT_ERROR)
    assert (limited.codecs, limited.budget.error) == (CODECS, 0.1)
    adaptive, still = plain.suited(adaptive=True), limited.suited(adaptive=True)
    assert (adaptive.codecs, adaptive.budget) == (ADAPTIVE_CODECS, Budget(ADAPTIVE_ERROR, adaptive=True))
    assert (still.codecs, still.budget.error) == (ADAPTIVE_CODECS, 0.1)
    assert plain.suited(adaptive=False) == plain
    both = ("auto(int8, powersgd(rank=4) | bf16, error=1)", 'auto(codecs="int8, powersgd(rank=4) | bf16", error=1)')
    for text in both:
        found = parse_auto(text)
        assert found is not None
        assert (found.codecs, found.budget.error) == (("int8", "powersgd(rank=4) | bf16"), 1.0)
        assert found.suited(adaptive=False) == found
        suited = found.suited(adaptive=True)
        assert (suited.codecs, suited.budget) == (found.codecs, Budget(1.0, adaptive=True))
    assert parse_auto(str(found)) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("auto(rank=4)", "no option 'rank': use auto, auto"),
        ("auto(nothing)", "nothing"),
        ("auto(error=much)", "error takes a number"),
        ("auto(error=-1)", "use a relative squared error"),
    ],
)
def test_a_wrong_spec_says_what_to_write(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_auto(text)


def test_the_evidence_for_the_default_budget_is_committed() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "codec-errors-cpu.json"
    rows = json.loads(file.read_text())["rows"]
    ok = {row["codec"] for row in rows if max(r["error"] for r in rows if r["codec"] == row["codec"]) <= DEFAULT_ERROR}
    assert {"int8", "int4"} <= ok
    assert not {"terngrad", "powersgd(rank=4) | bf16", "topk(0.01)"} & ok
