"""The planner against brute force: every order of small problems, many fixed configurations of known models."""

import random
import re
import time
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from cost_cases import CODECS, bert, by_multiplications, costs
from model_shapes import mlp, resnet50, vgg19

from syncline.errors import UsageError
from syncline.plan import (
    Budget,
    Choice,
    CodecError,
    Costs,
    Curve,
    Errors,
    Host,
    LinkCost,
    Plan,
    Shape,
    default_plan,
    predict,
    reorder,
    scenario,
    search,
)
from syncline.plan.candidates import regroupings, with_units
from syncline.plan.launch_order import arrange, greedy_launch_order
from syncline.plan.per_unit_codecs import secopa
from syncline.plan.planner import LIGHT, NEAR
from syncline.plan.predict import exchanges_to_weigh
from syncline.sim import Job, Layer, Scenario, Transfer, simulate

POWERSGD = "powersgd(rank=64)"
LOSSY = ["int8", "terngrad", POWERSGD]
MODELS = {"vgg19": vgg19(), "resnet50": resnet50()}


def small(seed: int, *, units: int, parts: int = 1) -> Scenario:
    """A random problem: unequal layers, wire from a tenth to three times the compute, one or two rounds."""
    rng = random.Random(seed)
    layers = tuple(Layer(f"layer{i}", rng.random() ** 2, 2 * rng.random() ** 2, (i,)) for i in range(units))
    compute = sum(a.forward + a.backward for a in layers)
    size = [rng.random() ** 3 + 0.01 for _ in range(units)]
    scale = rng.choice([0.1, 0.5, 1.0, 1.0, 1.5, 3.0]) * compute / sum(size)
    codec, latency = rng.choice([0.0, 0.02, 0.1]), rng.choice([0.0, 0.01, 0.1]) * compute / units
    rounds = rng.choice([1, 2])
    jobs = []
    for unit in range(units):
        count = rng.randint(1, parts)
        wire = size[unit] * scale / count
        each = [rng.random() for _ in range(rounds)]
        sent = tuple(Transfer(latency, wire * part / sum(each)) for part in each)
        jobs += [Job(unit, unit, codec * wire, sent, codec * wire, codec * wire)] * count
    updates = tuple(0.02 * s * scale for s in size)
    contention = rng.choice([0.0, 0.0, 0.3, 1.0])
    return Scenario(layers, tuple(reversed(jobs)), updates, data=0.1, lanes=rng.randint(1, 6), contention=contention)


def optimum(base: Scenario) -> float:
    seen: dict[tuple[int, ...], float] = {}
    for order in permutations(range(len(base.jobs))):
        kinds = tuple(base.jobs[i].unit for i in order)
        if kinds not in seen:
            seen[kinds] = simulate(base.ordered(order)).step
    return min(seen.values())


@pytest.mark.parametrize(
    ("units", "parts", "cases"),
    [
        (3, 1, 20),
        (5, 1, 15),
        (3, 3, 6),
        *(pytest.param(*many, marks=pytest.mark.full) for many in [(3, 1, 40), (5, 1, 40), (6, 1, 25), (3, 3, 15)]),
    ],
)
def test_small_problems_within_two_percent_of_the_best_of_all_orders(units: int, parts: int, cases: int) -> None:
    worst = 0.0
    for seed in range(cases):
        base = small(seed, units=units, parts=parts)
        order, step = arrange(base, launches=10_000)
        assert step == simulate(base.ordered(order)).step
        worst = max(worst, step / optimum(base) - 1)
    assert worst <= 0.02


NETWORKS: dict[str, dict[str, float]] = {
    "200mbit": {"bytes_per_s": 25e6, "world": 4},
    "1gbit": {"bytes_per_s": 119e6},
    "10gbit": {"bytes_per_s": 1.2e9, "latency": 3e-5},
    "cpu": {"bytes_per_s": 119e6, "contention": 1.0, "slow": 100.0},
}


@lru_cache
def fixed(model: str) -> list[Plan]:
    """Configurations that a person might try."""
    plans = [
        default_plan(MODELS[model], compress=codec, exchange=carrier, group_bytes=group, part_bytes=part)
        for codec in ("none", "bf16", *LOSSY)
        for carrier in exchanges_to_weigh(codec, 4)
        for group in (1 << 18, 1 << 20, 4 << 20, 32 << 20)
        for part in (1 << 20, 4 << 20, 16 << 20, 1 << 40)
    ]
    return list({plan.hash: plan for plan in plans}.values())


def known(model: str, compute: float, bytes_per_s: float, **fields: float) -> Costs:
    shapes = MODELS[model]
    weights = by_multiplications(shapes) if model == "vgg19" else None
    return costs(shapes, compute, weights=weights, bytes_per_s=bytes_per_s, **fields)  # type: ignore[arg-type]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "compute", "network"),
    [
        # Every model with half of the networks, and every network with half of the models.
        pytest.param(model, compute, network, marks=[] if compute < 0.1 and (i + j) % 2 == 0 else [pytest.mark.full])
        for compute in (0.03, 0.2)
        for i, model in enumerate(MODELS)
        for j, network in enumerate(NETWORKS)
    ],
)
def test_within_five_percent_of_the_best_fixed_configuration(model: str, compute: float, network: str) -> None:
    shapes, measured = MODELS[model], known(model, compute, **NETWORKS[network])
    best = float("inf")
    for plan in fixed(model):
        base = scenario(plan, shapes, measured)
        best = min(best, simulate(base.ordered(greedy_launch_order(base))).step)
    choice = search(shapes, measured, allowed=LOSSY)
    assert choice.step <= 1.05 * best
    consistent(choice, shapes, measured)


def consistent(choice: Choice, shapes: list[Shape], measured: Costs) -> None:
    assert predict(choice.plan, shapes, measured).step == pytest.approx(choice.step)
    choice.plan.check(shapes, world=measured.world)
    steps = [entry.step for entry in choice.alternatives]
    assert steps == sorted(steps)
    assert {"none", "bf16", *LOSSY} <= {entry.name for entry in choice.alternatives}
    for entry in choice.alternatives:
        assert predict(entry.plan, shapes, measured).step == pytest.approx(entry.step)
        if entry.name != "mixed":
            assert {unit.codec for unit in entry.plan.units} == {entry.name}


def test_a_fast_network_needs_no_compression() -> None:
    for model, shapes in MODELS.items():
        choice = search(shapes, known(model, 0.1, 50e9, latency=1e-5), allowed=LOSSY)
        assert {unit.codec for unit in choice.plan.units} == {"none"}
        assert choice.why.startswith("do not compress: dense is predicted at")
        assert "next best" in choice.why


@pytest.mark.parametrize(("compute", "of_bound"), [(0.204, 1.06), (0.0295, 1.04)])
def test_the_headline(compute: float, of_bound: float) -> None:
    """VGG19, PowerSGD rank 64, two nodes of 119 MB/s; nothing about VGG is in the planner."""
    shapes, measured = MODELS["vgg19"], known("vgg19", compute, 119e6)
    choice = search(shapes, measured, allowed=[POWERSGD], always=(), mix=False)
    assert {unit.codec for unit in choice.plan.units} == {POWERSGD}
    assert choice.step <= of_bound * choice.bound
    assert choice.bound == pytest.approx(max(0.204, compute), rel=0.02)
    order = [name for name, _ in choice.plan.order]
    first, fc1 = (order.index(next(u.name for u in choice.plan.units if p in u.parameters))
                  for p in ("features.0.weight", "classifier.0.weight"))  # fmt: skip
    if compute > 0.2:
        # Ready second and needed last but two, it lets nearly everybody pass; by hand it was moved behind conv1.
        assert fc1 > len(order) * 2 / 3
        base = scenario(choice.plan, shapes, measured)
        others = [i for i in range(len(order)) if i != fc1]
        by_hand = simulate(base.ordered([*others[:first], fc1, *others[first:]]))
        assert choice.step <= by_hand.step * 1.01
    # The default grouping, ordered anew, gets there as well.
    same = reorder(default_plan(shapes, compress=POWERSGD), shapes, measured)
    assert same.step <= of_bound * choice.bound


def test_the_same_costs_give_the_same_plan() -> None:
    measured = known("resnet50", 0.08, 119e6, world=4)
    made = [search(MODELS["resnet50"], measured, allowed=LOSSY) for _ in range(2)]
    assert made[0].plan.hash == made[1].plan.hash
    assert made[0] == made[1]


@pytest.mark.parametrize(("shapes", "most"), [(resnet50(), 3.0), (bert(), 5.0)], ids=["resnet50", "bert"])
def test_a_search_takes_seconds(shapes: list[Shape], most: float) -> None:
    measured = costs(shapes, 0.2, world=4)
    predict(default_plan(shapes, compress="int8"), shapes, measured)  # torch's own first use of meta tensors
    begin = time.process_time()
    choice = search(shapes, measured, allowed=["int8", "int4", "terngrad"])
    assert time.process_time() - begin < most
    assert choice.step < predict(default_plan(shapes), shapes, measured).step


def test_a_lossier_choice_must_be_worth_it() -> None:
    shapes, free = mlp(), {name: replace(CODECS["none"]) for name in CODECS}
    for compute in (0.05, 0.055, 0.06, 0.065, 0.07, 0.08, 0.1):
        measured = replace(costs(shapes, compute, bytes_per_s=119e6), codecs=free)
        choice = search(shapes, measured, allowed=["int8"])
        steps = {entry.name: entry.step for entry in choice.alternatives}
        if choice.plan.about["chosen"] == "none":
            assert min(steps.values()) >= 0.969 * steps["none"]
        elif choice.plan.about["chosen"] == "bf16":
            assert steps["bf16"] < 0.97 * steps["none"]
            assert steps["int8"] >= 0.969 * steps["bf16"]
        else:
            assert choice.step < 0.97 * steps["none"]


ERRORS = {"int8": 1e-5, "int4": 4e-3}


def with_errors(shapes: list[Shape], measured: Costs, lost: dict[str, float], budget: Budget | None = None) -> Choice:
    """The choice where every parameter loses the same with a codec."""
    rows = {codec: {shape.name: CodecError(error, error) for shape in shapes} for codec, error in lost.items()}
    errors = Errors({shape.name: 1.0 for shape in shapes}, rows)
    return search(shapes, measured, allowed=["int8", "int4"], errors=errors, budget=budget)


def on_shared_cores(slow: float) -> Costs:
    """Codecs that take the cores of compute, and are slower by this factor than on a GPU."""
    return costs(mlp(), 0.1, slow=slow, contention=1.0)


def test_a_codec_that_sends_much_less_and_is_about_as_fast_is_a_contender() -> None:
    shapes, measured, budget = mlp(), on_shared_cores(100), Budget(0.01, adaptive=True)
    choice = with_errors(shapes, measured, ERRORS, budget)
    other = choice.contender
    assert choice.plan.about["chosen"] == "bf16"
    assert other is not None
    assert {unit.codec for unit in other.plan.units} == {"int4"}
    assert choice.step < other.step <= (1 + NEAR) * choice.step
    told, of_choice = (predict(one.plan, shapes, measured) for one in (other, choice))
    assert told.step == pytest.approx(other.step)
    assert (other.bound, other.alternatives, other.contender) == (told.bound, (), None)
    assert told.wire <= LIGHT * of_choice.wire
    other.plan.check(shapes, world=measured.world)
    predicted, lost = {"predicted_ms": round(other.step * 1e3, 3)}, {"error": 0.004, "error_budget": 0.01}
    assert other.plan.about == {"chosen": "int4", **predicted, **lost, "adaptive": True}
    share = told.wire / of_choice.wire
    assert other.why == f"int4 was predicted at {other.step * 1e3:.1f} ms, with {share:.0%} of the time on the network"
    assert with_errors(shapes, measured, ERRORS, budget) == choice, "the same costs give the same contender"


def test_a_plan_that_cannot_win_is_no_contender() -> None:
    shapes, near = mlp(), on_shared_cores(100)
    assert with_errors(shapes, near, {"int8": 0.5, "int4": 0.5}).contender is None, "beyond the budget"
    assert search(shapes, near, allowed=["int8", "int4"]).contender is None, "no errors were measured"
    assert with_errors(shapes, near, ERRORS | {"int4": 0.5}).contender is None, "int8 sends as much as BF16"
    slow = with_errors(shapes, on_shared_cores(300), ERRORS)
    assert slow.plan.about["chosen"] == "bf16"
    assert slow.contender is None, "much slower"
    lightest = with_errors(shapes, costs(shapes, 0.01), ERRORS)
    assert lightest.plan.about["chosen"] == "int4"
    assert lightest.contender is None, "nothing sends less"


def test_where_nothing_waits_for_the_network_there_is_no_contender() -> None:
    shapes = mlp()
    fast, alone = costs(shapes, 0.1, bytes_per_s=50e9), replace(costs(shapes, 0.01, world=1), update=Curve(0.0, 1e-8))
    for measured in (fast, replace(alone, world=2, link=LinkCost(0.0, float("inf"))), alone):
        choice = with_errors(shapes, measured, ERRORS)
        assert choice.plan.about["chosen"] == "none"
        assert choice.contender is None


def test_many_ranks_want_sharded() -> None:
    shapes = vgg19()
    for world, carrier in ((2, "allgather"), (8, "sharded")):
        measured = costs(shapes, 0.05, world=world)
        choice = search(shapes, measured, allowed=["int8"], always=(), mix=False)
        assert {unit.exchange for unit in choice.plan.units} == {carrier}


def test_secopa_compresses_what_is_large() -> None:
    shapes = vgg19()
    measured = costs(shapes, 0.05, latency=1e-4, slow=20.0)
    plan = default_plan(shapes, compress="none", group_bytes=0, part_bytes=1 << 40)
    conv1, fc1 = plan.units[0], next(u for u in plan.units if "classifier.0.weight" in u.parameters)
    plain, packed = secopa(fc1, shapes, measured, POWERSGD)
    assert packed < plain
    plain, packed = secopa(conv1, shapes, measured, "int8")
    assert packed > plain


def test_a_mixture_where_one_unit_is_most_of_the_bytes() -> None:
    """Codecs so slow that compressing everything is as slow as nothing: only the large unit is worth it."""
    shapes = vgg19()
    measured = replace(known("vgg19", 0.2, 119e6, slow=60.0), contention=1.0)
    choice = search(shapes, measured, allowed=[POWERSGD])
    steps = {entry.name: entry.step for entry in choice.alternatives}
    assert choice.step <= min(steps.values()) * 1.031
    plain = search(shapes, measured, allowed=[POWERSGD], mix=False)
    assert choice.step <= plain.step * 1.001


def test_other_parts_stay_in_their_places() -> None:
    plan = default_plan(vgg19(), part_bytes=64 << 20)
    large = next(u for u in plan.units if "classifier.0.weight" in u.parameters)
    assert large.partitions == 7
    for count in (1, 3, 7, 9):
        trial = with_units(plan, {large.name: replace(large, partitions=count)})
        trial.check(vgg19())
        others = [part for part in trial.order if part[0] != large.name]
        assert others == [part for part in plan.order if part[0] != large.name]
        assert trial.order.index((large.name, 0)) == plan.order.index((large.name, 0))


@pytest.mark.parametrize("part_bytes", [1 << 20, 1 << 40])
def test_other_groupings_are_plans_of_the_same_model(part_bytes: int) -> None:
    shapes = resnet50()
    plan = default_plan(shapes, part_bytes=part_bytes)
    counts = []
    for trial in regroupings(plan, {shape.name: shape for shape in shapes}):
        trial.check(shapes)
        counts.append(len(trial.units) - len(plan.units))
        assert [name for unit in trial.units for name in unit.parameters] == [shape.name for shape in shapes]
        for unit in trial.units:
            modules = {name.rpartition(".")[0] for name in unit.parameters}
            assert sum(shape.name.rpartition(".")[0] in modules for shape in shapes) == len(unit.parameters)
    assert set(counts) == {1, -1}


def test_an_infinite_network_and_a_single_rank() -> None:
    shapes = mlp()
    for measured in (replace(costs(shapes, 0.01), link=LinkCost(0.0, float("inf"))), costs(shapes, 0.01, world=1)):
        choice = search(shapes, measured, allowed=["int8"])
        assert choice.plan.about["chosen"] == "none"


def test_a_host_that_cannot_keep_up_gets_fewer_launches() -> None:
    shapes = resnet50()
    plain = costs(shapes, 0.06, bytes_per_s=3e9)
    slow = replace(plain, host=Host(passes=0.04, launch=6e-4, update=2e-4))
    free, held = (search(shapes, given, always=("none",), mix=False) for given in (plain, slow))
    assert len(held.plan.order) < len(free.plan.order) / 2
    assert held.step < predict(free.plan, shapes, slow).step
    assert held.step < 0.063, "with few launches the host is not the bound any more"


def test_nothing_to_plan_is_an_error() -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        search([], costs(mlp(), 0.01))
    with pytest.raises(UsageError, match="no codec to weigh"):
        search(mlp(), costs(mlp(), 0.01), always=())


def test_the_example_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    scope: dict[str, object] = {}
    for (language, code), (_, output) in pairwise(blocks):
        if language == "python":
            exec(code, scope)
            assert capsys.readouterr().out == output
    assert "errors" in scope, "both examples were run"
