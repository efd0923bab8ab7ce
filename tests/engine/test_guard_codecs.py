"""The codecs to which the guard's units step back: what loses next to nothing, by what was measured and read."""

from types import SimpleNamespace
from typing import Any

import pytest

from syncline.engine.tuning.codec_guard import CodecGuard
from syncline.engine.tuning.guard_rules import Reading
from syncline.plan import CodecCost, CodecError, Costs, Curve, Errors, LinkCost, Shape, default_plan
from syncline.plan.auto_spec import parse_auto
from syncline.plan.predict import built

SHAPES = [Shape("a.weight", (1000, 1000)), Shape("b.weight", (1000, 1000))]
NAMES = [shape.name for shape in SHAPES]
INT4, INT8 = built("int4").text, built("int8").text


def guard_of(codec: str, *, int8: float = 1e-5) -> CodecGuard:
    """A guard of two units with this codec on a slow network, where fewer bytes are always faster."""
    automatic = parse_auto("auto(int8, int4)")
    assert automatic is not None
    said: list[str] = []
    engine: Any = SimpleNamespace(step=7, say=said.append)
    guard = CodecGuard(engine, automatic)
    zero = dict.fromkeys(NAMES, 0.0)
    cost = CodecCost(Curve(), Curve(), Curve())
    codecs = dict.fromkeys(("none", "bf16", INT8, INT4), cost)
    costs = Costs(2, 0.01, 0.02, zero, zero, LinkCost(1e-4, 1e6), codecs, Curve())
    rows = {INT4: CodecError(0.004, 0.004), INT8: CodecError(int8, int8)}
    errors = Errors(dict.fromkeys(NAMES, 1.0), {name: dict.fromkeys(NAMES, row) for name, row in rows.items()})
    guard.planned(default_plan(SHAPES, compress=codec, group_bytes=0), SHAPES, costs, errors)
    return guard


def codecs(guard: CodecGuard, readings: dict[str, Reading], jump: float = 1.0) -> list[str]:
    """The codecs of both units after these readings."""
    plan = guard._judge(readings, jump)
    assert guard._guarded is not None
    return [unit.codec for unit in (plan or guard._guarded.plan).units]


def test_a_critical_phase_makes_int4_int8_and_leaves_int8() -> None:
    assert codecs(guard_of("int4"), {}, jump=10.0) == ["int8", "int8"]
    assert codecs(guard_of("int8"), {}, jump=10.0) == ["int8", "int8"]


@pytest.mark.parametrize(
    ("error", "codec"),
    [(0.05, "int8"), (0.9, "bf16")],
    ids=["int8 has grown as much and still loses next to nothing", "int8 would lose too much, too"],
)
def test_what_was_read_counts_for_better_codecs_too(error: float, codec: str) -> None:
    first, second = (unit.name for unit in guard_of("int4")._guarded.plan.units)  # type: ignore[union-attr]
    found = codecs(guard_of("int4"), {first: Reading(error), second: Reading(0.001)})
    assert found == [codec, "int4"]


def test_a_codec_that_lost_too_much_does_not_stay_because_it_was_good_before() -> None:
    guard = guard_of("int8", int8=0.0)
    first, _ = (unit.name for unit in guard._guarded.plan.units)  # type: ignore[union-attr]
    assert codecs(guard, {first: Reading(0.9)}) == ["bf16", "int8"], "it was measured without any error"


def test_what_a_codec_loses_of_its_own_output_is_no_measurement() -> None:
    errors = Errors(dict.fromkeys(NAMES, 1.0), {INT4: dict.fromkeys(NAMES, CodecError(0.1, 0.1))})
    assert list(errors.without(INT4, NAMES[:1]).codecs[INT4]) == NAMES[1:]
