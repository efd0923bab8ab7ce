"""Cost curves: lines through points, the file and its errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cost_cases import costs
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shapes import mlp

from syncline.errors import UsageError
from syncline.plan import CodecCost, Curve, Host, LinkCost, load_costs

TIMES = st.floats(0, 10)


@settings(deadline=None)
@given(TIMES, TIMES, st.lists(st.integers(1, 10**9), min_size=2, max_size=6, unique=True))
def test_a_line_goes_through_its_own_points(fixed: float, each: float, values: list[int]) -> None:
    each *= 1e-9
    found = Curve.through([(v, fixed + each * v) for v in values])
    for v in values:
        assert found(v) == pytest.approx(fixed + each * v, rel=1e-6, abs=1e-7)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), TIMES), max_size=6))
def test_no_part_of_a_line_is_below_zero(points: list[tuple[int, float]]) -> None:
    found = Curve.through([(float(v), s) for v, s in points])
    assert found.fixed >= 0
    assert found.each >= 0
    assert found(0) == 0


def test_one_point_is_a_fixed_time_and_none_is_nothing() -> None:
    assert Curve.through([(1000, 0.5)]) == Curve(0.5, 0.0)
    assert Curve.through([]) == Curve()
    # Where longer takes less, there is no part for each value.
    assert Curve.through([(10, 2.0), (20, 1.0)]) == Curve(1.5, 0.0)
    # Where the line would start below zero it starts there.
    assert Curve.through([(10, 0.0), (20, 1.0)]) == Curve(0.0, pytest.approx(0.04))


def test_costs_come_back_from_a_file(tmp_path: Path) -> None:
    made = costs(mlp(), 0.1, data=0.001, contention=0.5)
    made = replace(made, codecs={**made.codecs, "topk(0.01) | int8": CodecCost(Curve(1.0, 2.0), issue=3.0)})
    made = replace(made, host=Host(0.01, 2e-4, 1e-4))
    file = tmp_path / "costs.json"
    file.write_text(made.to_json())
    assert load_costs(file) == made
    fast = replace(made, link=LinkCost(0.0, float("inf")))
    file.write_text(fast.to_json())
    assert load_costs(file) == fast
    table = json.loads(made.to_json())
    del table["host"]
    table["tail"] = 0.0
    del table["codecs"]["topk(0.01) | int8"]["issue"]
    file.write_text(json.dumps(table))
    old = load_costs(file)
    assert (old.host, old.codecs["topk(0.01) | int8"].issue) == (Host(), 0.0), "as files from before have it"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.update(version=0), "version 1"),
        (lambda table: table.pop("version"), "version 1"),
        (lambda table: table.pop("link"), "link"),
        (lambda table: table.update(wire=1), "wire"),
        (lambda table: table["codecs"]["none"].update(merge={}), "merge"),
        (lambda table: table.update(world=0), "world=0"),
        (lambda table: table["link"].update(bytes_per_s=0), "bytes_per_s=0"),
        (lambda table: table.update(forward=-1), "a time of -1 s"),
        (lambda table: table.update(forward="long"), "does not hold costs"),
    ],
)
def test_a_file_that_is_none_says_why(tmp_path: Path, change: object, says: str) -> None:
    table = json.loads(costs(mlp(), 0.1).to_json())
    change(table)  # type: ignore[operator]
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(table))
    with pytest.raises(UsageError, match=says):
        load_costs(file)


def test_no_file_and_no_json_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_costs(tmp_path / "nothing.json")
    for text in ("{", "[]", "3"):
        (tmp_path / "costs.json").write_text(text)
        with pytest.raises(UsageError, match="does not hold costs"):
            load_costs(tmp_path / "costs.json")
