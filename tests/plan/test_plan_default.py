"""The default plan on well-known models: what is grouped, what is cut, and what passes what."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shapes import layer, mlp, resnet50, vgg19

from syncline import codecs, exchange
from syncline.errors import UsageError
from syncline.plan import Plan, Shape, default_plan

MIB = 1 << 20


def named(plan: Plan) -> list[str]:
    return [unit.name for unit in plan.units]


def parts(plan: Plan) -> dict[str, int]:
    return {unit.name: unit.partitions for unit in plan.units}


def test_the_lists_are_the_models() -> None:
    assert (len(vgg19()), sum(s.values for s in vgg19())) == (38, 143_667_240)
    assert (len(resnet50()), sum(s.values for s in resnet50())) == (161, 25_557_032)


def test_mlp() -> None:
    plan = default_plan(mlp())
    assert named(plan) == ["0", "2..4"]
    assert plan.units[0].parameters == ("0.weight", "0.bias")
    assert {(u.codec, u.exchange) for u in plan.units} == {("none", "allreduce")}
    assert plan == default_plan(mlp())
    assert plan.hash == default_plan(mlp()).hash


def test_a_small_model_is_one_unit() -> None:
    plan = default_plan([*layer("a", (4, 3)), *layer("b.c", (2, 4))])
    assert named(plan) == ["a..b.c"]
    assert plan.units[0].parameters == ("a.weight", "a.bias", "b.c.weight", "b.c.bias")
    assert plan.order == (("a..b.c", 0),)


def test_weight_and_bias_stay_together_whatever_the_size() -> None:
    for shapes in (vgg19(), mlp(), layer("only", (3, 3)), [Shape("weight", (2048, 2048)), Shape("bias", (2048,))]):
        for group in (0, MIB, 1 << 40):
            owner = {p: u.name for u in default_plan(shapes, group_bytes=group).units for p in u.parameters}
            assert all(owner[n] == owner[n.replace("bias", "weight")] for n in owner)


def test_groups_end_when_they_are_full() -> None:
    shapes = [s for i in range(8) for s in layer(f"m{i}", (256, 256))]  # a quarter of a MiB each, and a bias
    assert named(default_plan(shapes)) == ["m0..m3", "m4..m7"]
    assert named(default_plan(shapes, group_bytes=0)) == [f"m{i}" for i in range(8)]
    assert named(default_plan(shapes, group_bytes=1 << 40)) == ["m0..m7"]


def test_a_crumb_between_large_layers_joins_the_one_before() -> None:
    shapes = [
        *layer("conv1", (512, 512)),
        *layer("bn", (512,)),
        *layer("conv2", (512, 512)),
        *layer("half", (256, 256)),
    ]
    assert named(default_plan(shapes)) == ["conv1..bn", "conv2", "half"]
    assert named(default_plan(shapes[::-1])) == ["half", "conv2..bn", "conv1"]


def test_root_parameters_go_by_their_own_name() -> None:
    assert named(default_plan([Shape("scale", (3,))])) == ["scale"]
    shapes = [Shape("cls", (3,)), Shape("pos", (2048, 512)), *layer("fc", (1024, 1024))]
    assert named(default_plan(shapes)) == ["cls..pos", "fc"]


def test_names_are_unique() -> None:
    big = (1024, 1024)
    shapes = [Shape("fc", big), Shape("fc.weight", big), Shape("fc.scale", big, torch.bfloat16), Shape("fc#2.w", big)]
    assert named(default_plan(shapes)) == ["fc", "fc#3", "fc#4", "fc#2"]


def test_vgg_first_convolution_passes_the_large_layers() -> None:
    plan = default_plan(vgg19())
    assert parts(plan)["classifier.0"] == 99
    assert parts(plan)["classifier.3"] == 17
    assert plan.units[0].name == "features.0..features.7"
    assert plan.units[0].partitions == 1
    at = plan.order.index((plan.units[0].name, 0))
    assert at < plan.order.index(("classifier.0", 98))
    assert at < plan.order.index(("classifier.3", 16))
    assert plan.order[0] == ("classifier.6", 0)
    for unit in plan.units:
        mine = [part for name, part in plan.order if name == unit.name]
        assert mine == sorted(mine)


def test_a_part_is_no_larger_than_asked() -> None:
    shapes = [*layer("a", (1000, 1000)), *layer("b", (3000, 1000))]
    assert parts(default_plan(shapes, part_bytes=MIB)) == {"a": 4, "b": 12}
    assert parts(default_plan(shapes, part_bytes=1 << 40)) == {"a": 1, "b": 1}
    assert parts(default_plan([Shape("a", (3,))], part_bytes=1)) == {"a": 3}
    assert parts(default_plan([Shape("a", (0,))], part_bytes=1)) == {"a": 1}


def test_resnet50() -> None:
    plan = default_plan(resnet50())
    assert 20 < len(plan.units) < 60
    assert max(len(u.parameters) for u in plan.units) < 40
    sizes = {s.name: s.nbytes for s in resnet50()}
    assert min(sum(sizes[p] for p in u.parameters) for u in plan.units) > 1 << 16


def test_powersgd_is_never_cut() -> None:
    plan = default_plan(vgg19(), compress="powersgd(rank=64)", part_bytes=1)
    assert {u.partitions for u in plan.units} == {1}
    assert {(u.codec, u.exchange) for u in plan.units} == {("powersgd(rank=64)", "allreduce")}
    assert len(plan.order) == len(plan.units)


def test_topk_gathers_and_is_cut_by_what_it_sends() -> None:
    plan = default_plan(vgg19(), compress="topk(0.01)|int8")
    assert {(u.codec, u.exchange) for u in plan.units} == {("topk(0.01) | int8", "allgather")}
    assert parts(plan)["classifier.0"] == 2


def test_bf16_halves_the_parts() -> None:
    assert parts(default_plan(vgg19(), compress="bf16"))["classifier.0"] == 50
    shapes = [replace(s, dtype=torch.bfloat16) for s in vgg19()]
    assert parts(default_plan(shapes))["classifier.0"] == 50


def test_dtypes_do_not_mix() -> None:
    shapes = [*layer("a", (4, 4)), *layer("b", (4, 4), dtype=torch.bfloat16), *layer("c", (4, 4))]
    assert named(default_plan(shapes)) == ["a", "b", "c"]
    mixed = [Shape("n.weight", (8,)), Shape("n.bias", (8,), torch.bfloat16)]
    assert named(default_plan(mixed)) == ["n", "n#2"]


@pytest.mark.parametrize(
    "codec", ["none", "bf16", "int8", "onebit", "dgc", "threshold", "acpsgd", "warmup(topk, steps=2)"]
)
def test_any_codec_with_any_exchange_that_trains(codec: str) -> None:
    for carrier in exchange.legal(codec):
        plan = default_plan(mlp(), compress=codec, exchange=carrier)
        assert {u.exchange for u in plan.units} == {carrier}
        plan.check(mlp(), world=4)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(1, 40), max_size=3)), min_size=1, max_size=8))
def test_any_model_gets_a_plan_that_holds(tensors: list[tuple[str, list[int]]]) -> None:
    shapes = [Shape(f"{module}.p{i}", tuple(shape)) for i, (module, shape) in enumerate(tensors)]
    for codec in ("none", "powersgd(rank=1)", "topk(0.1)"):
        default_plan(shapes, compress=codec, group_bytes=512, part_bytes=256).check(shapes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compress": "topkk"}, "did you mean 'topk'"),
        ({"compress": "topk(0.01"}, "cannot read"),
        ({"compress": ""}, "cannot read"),
        ({"compress": "topk", "exchange": "allreduce"}, "with this codec use allgather"),
        ({"exchange": "rings"}, "did you mean 'ring'"),
        ({"exchange": "server(servers=3)"}, "use 1 to 2 servers"),
        ({"part_bytes": 0}, "part_bytes=0"),
        ({"group_bytes": -1}, "group_bytes=-1"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        default_plan(mlp(), **options)


def test_models_that_cannot_train_are_named() -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        default_plan([])
    with pytest.raises(UsageError, match="'step' is int64"):
        default_plan([*mlp(), Shape("step", (), torch.int64)])
    with pytest.raises(UsageError, match=r"'0\.bias' is given twice"):
        default_plan([*mlp(), mlp()[1]])


def test_the_first_legal_exchange_always_lets_all_ranks_train() -> None:
    for name in codecs.available():
        if not codecs.CODECS.get(name).wraps:
            default_plan(mlp(), compress=name)
