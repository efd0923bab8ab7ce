"""A plan's hash, its text for a person, and everything that `check` refuses."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from syncline.errors import UsageError
from syncline.plan import Plan, Shape, Unit

SHAPES = [Shape("conv.weight", (8, 3, 3, 3)), Shape("conv.bias", (8,)), Shape("fc.weight", (10, 8)), Shape("b", (2,))]
CONV = Unit("conv", ("conv.weight", "conv.bias"))
FC = Unit("fc", ("fc.weight",), "topk(0.1)", "allgather", 2)
LAST = Unit("b", ("b",))
PLAN = Plan((CONV, FC, LAST), (("fc", 0), ("conv", 0), ("fc", 1), ("b", 0)))


def with_unit(**changes: object) -> Plan:
    """PLAN with its last unit changed."""
    return replace(PLAN, units=(CONV, FC, replace(LAST, **changes)))


def refused(plan: Plan, shapes: list[Shape] = SHAPES, **options: int) -> str:
    with pytest.raises(UsageError) as caught:
        plan.check(shapes, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_hash_is_the_same_everywhere_and_for_ever() -> None:
    assert PLAN.hash == "4cd50452c8b86952"
    code = (
        "from syncline.plan import Plan, Unit\n"
        f"units = {tuple((u.name, u.parameters, u.codec, u.exchange, u.partitions) for u in PLAN.units)!r}\n"
        f"print(Plan(tuple(Unit(*u) for u in units), {PLAN.order!r}).hash)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == PLAN.hash


def test_the_hash_sees_units_and_order_and_nothing_else() -> None:
    swapped = replace(PLAN, order=(PLAN.order[1], PLAN.order[0], *PLAN.order[2:]))
    others = [
        swapped,
        replace(PLAN, units=(FC, CONV, LAST)),
        with_unit(name="c"),
        with_unit(parameters=("b", "c")),
        with_unit(codec="bf16"),
        with_unit(exchange="ring"),
        with_unit(partitions=2),
    ]
    assert len({plan.hash for plan in [PLAN, *others]}) == 8
    told = replace(PLAN, about={"step_ms": 12.5, "by": "me"})
    assert told.hash == PLAN.hash
    assert told != PLAN
    assert told == replace(PLAN, about={"by": "me", "step_ms": 12.5})
    assert hash(told) == hash(PLAN)


def test_names_cannot_be_shifted_into_one_another() -> None:
    one, two = Plan((Unit("a", ("b", "c")),), ()), Plan((Unit("a", ("b,c",)),), ())
    assert one.hash != two.hash


def test_the_table_is_aligned_and_says_it_all() -> None:
    text = replace(PLAN, about={"step_ms": 12.5}).table()
    lines = text.splitlines()
    assert lines[0].split() == ["launch", "unit", "parameters", "codec", "exchange", "partitions"]
    assert lines[1].split() == ["2", "conv", "conv.weight,", "conv.bias", "none", "allreduce", "1"]
    assert lines[2].split() == ["1,3", "fc", "fc.weight", "topk(0.1)", "allgather", "2"]
    assert len({line.index(word) for line, word in zip(lines, ("codec", "none", "topk", "none"), strict=False)}) == 1
    assert lines[4:] == [f"plan {PLAN.hash}: 3 units, 4 launches", "step_ms: 12.5"]


def test_the_table_is_short_for_many_parameters_and_survives_odd_names() -> None:
    unit = Unit("odd\nname", tuple(f"p{i}" for i in range(9)), partitions=8)
    order = tuple((name, part) for part in range(8) for name in ("odd\nname", "b")[: 2 if part == 0 else 1])
    lines = Plan((unit, LAST), order).table().splitlines()
    assert len(lines) == 4
    assert "1,3-9 " in lines[1]
    assert "p0, ..., p8, 9 in all" in lines[1]
    turns = tuple((name, part) for part in range(8) for name in ("odd\nname", "b"))
    assert "1,...,15 " in Plan((unit, replace(LAST, partitions=8)), turns).table()


def test_a_good_plan_passes_in_any_order_of_parameters() -> None:
    PLAN.check(SHAPES)
    PLAN.check(SHAPES[::-1], world=1)
    with_unit(codec="bf16", exchange="hierarchical").check(SHAPES, world=8)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (with_unit(parameters=("fc.wieght",)), ["'b'", "'fc.wieght'", "did you mean 'fc.weight'"]),
        (with_unit(parameters=("b", "zzz")), ["'zzz'", "does not train", "make the plan again"]),
        (with_unit(parameters=("b", "conv.bias")), ["'conv.bias'", "in unit 'conv' and in unit 'b'"]),
        (with_unit(parameters=("b", "b")), ["'b'", "twice in unit 'b'"]),
        (with_unit(parameters=()), ["'b' has no parameters"]),
        (replace(PLAN, units=(CONV, FC), order=PLAN.order[:3]), ["no unit", "'b'"]),
        (with_unit(name="fc"), ["two units are called 'fc'"]),
        (with_unit(codec="topk(0.1)"), ["unit 'b'", "topk(0.1)", "allreduce", "allgather"]),
        (with_unit(codec="topkk"), ["unit 'b'", "did you mean 'topk'"]),
        (with_unit(exchange="rings"), ["unit 'b'", "did you mean 'ring'"]),
        (with_unit(codec="powersgd", partitions=2), ["the order does not launch 'b[1]'"]),
        (with_unit(partitions=0), ["'b'", "partitions = 0", "1 or more"]),
        (with_unit(exchange="server(dedicated=true)"), ["leave different ranks to train", "same dedicated servers"]),
        (with_unit(exchange="server(servers=5)"), ["use 1 to 2 servers"]),
        (replace(PLAN, order=PLAN.order[1:]), ["does not launch 'fc[0]'"]),
        (replace(PLAN, order=()), ["does not launch 'conv' and 3 more"]),
        (replace(PLAN, order=(*PLAN.order, ("fc", 0))), ["'fc[0]' twice"]),
        (replace(PLAN, order=(*PLAN.order, ("b", 0))), ["'b' twice"]),
        (replace(PLAN, order=(*PLAN.order, ("fb", 0))), ["'fb'", "not a unit"]),
        (replace(PLAN, order=(*PLAN.order, ("fc", 2))), ["'fc[2]'", "last part", "'fc[1]'"]),
        (replace(PLAN, order=(*PLAN.order, ("b", -1))), ["'b[-1]'", "last part", "'b'"]),
    ],
)
def test_check_names_what_is_wrong_and_the_way_out(plan: Plan, says: list[str]) -> None:
    message = refused(plan)
    assert all(words in message for words in says), message


def cut(codec: str, parts: int) -> Plan:
    """PLAN with its last unit cut, and launched as it is cut."""
    order = (*PLAN.order[:3], *(("b", part) for part in range(parts)))
    return replace(with_unit(codec=codec, partitions=parts), order=order)


@pytest.mark.parametrize("codec", ["powersgd", "acpsgd | bf16", "warmup(powersgd, steps=3)"])
def test_matrices_are_not_cut(codec: str) -> None:
    message = refused(cut(codec, 2))
    assert "whole matrices" in message
    assert "partitions = 1" in message
    choices = message.rpartition("(")[2]
    assert "topk" in choices
    assert not {"powersgd", "acpsgd", "warmup"} & set(choices.rstrip(")").split(", "))


def test_a_unit_has_a_value_for_every_part() -> None:
    cut("none", 2).check(SHAPES)
    assert "2 values: use 1 to 2" in refused(cut("none", 3))


def test_an_empty_parameter_is_one_part() -> None:
    with_unit().check([*SHAPES[:3], Shape("b", (0, 4))])


def test_dtypes_do_not_mix_in_a_unit() -> None:
    shapes = [SHAPES[0], replace(SHAPES[1], dtype=torch.bfloat16), *SHAPES[2:]]
    message = refused(PLAN, shapes)
    assert "float32 ('conv.weight')" in message
    assert "bfloat16 ('conv.bias')" in message


def test_parameters_that_cannot_train_are_refused() -> None:
    assert "nothing to train" in refused(PLAN, [])
    assert "'b' is int64" in refused(PLAN, [*SHAPES[:3], Shape("b", (2,), torch.int64)])
    assert "'b' is given twice" in refused(PLAN, [*SHAPES, SHAPES[3]])


def test_dedicated_servers_are_the_same_for_all_units() -> None:
    rows = [replace(unit, exchange="server(servers=2, dedicated=true)") for unit in PLAN.units]
    replace(PLAN, units=tuple(rows)).check(SHAPES, world=4)
    assert "use 1 to 1 servers" in refused(replace(PLAN, units=tuple(rows)), world=2)
    rows[0] = replace(rows[0], exchange="server(dedicated=true)")
    assert "leave different ranks to train" in refused(replace(PLAN, units=tuple(rows)), world=4)
