"""From a plan and costs to a scenario: layers, what is ready when, what is needed when, and what is sent."""

from dataclasses import replace

import pytest
from cost_cases import costs
from model_shapes import layer, resnet50, vgg19

from syncline import codecs, exchange
from syncline.plan import CodecCost, Costs, Curve, Host, LinkCost, Plan, Shape, Unit, default_plan, predict, scenario
from syncline.plan.predict import exchanges_to_weigh
from syncline.plan.predict import job as job_of
from syncline.sim import simulate

SHAPES = [*layer("first", (64, 32)), *layer("second", (128, 64)), *layer("third", (10, 128))]
LINK = LinkCost(0.001, 1e6)
HALF = CodecCost(Curve(0.001, 1e-6), Curve(0.002, 1e-6), Curve(0.003, 1e-6))


def hand_made(**fields: object) -> Costs:
    """Forward 6 s, backward 12 s; first, second and third are used at 1, 3 and 4 s, complete at 11, 8 and 3 s."""
    touched = {"first.weight": 1, "first.bias": 1.5, "second.weight": 3, "second.bias": 3, "third.weight": 4}
    complete = {"first.weight": 11, "first.bias": 10, "second.weight": 7, "second.bias": 8, "third.weight": 3}
    both = {**touched, "third.bias": 4}, {**complete, "third.bias": 2}
    return Costs(**{"world": 2, "forward": 6, "backward": 12, "touched": both[0], "complete": both[1], "link": LINK,
                    "codecs": {"bf16": HALF, "int8": HALF, "powersgd": HALF}, **fields})  # type: ignore[arg-type]  # fmt: skip


def units(codec: str = "none", carrier: str = "allreduce", parts: int = 1) -> Plan:
    rows = tuple(
        Unit(name, (f"{name}.weight", f"{name}.bias"), codec, carrier, parts) for name in ("first", "second", "third")
    )
    return Plan(rows, tuple((row.name, part) for row in reversed(rows) for part in range(parts)))


def test_layers_lie_between_first_uses() -> None:
    told = scenario(units(), SHAPES, hand_made(update=Curve(0.5, 1.0), data=0.25, lanes=3, contention=0.5))
    assert [(a.name, a.forward, a.backward, a.needs) for a in told.layers] == [
        ("start", 1, 1, ()),
        ("first", 2, 3, (0,)),
        ("second", 1, 5, (1,)),
        ("third", 2, 3, (2,)),
    ]
    assert [(job.unit, job.ready) for job in told.jobs] == [(2, 3), (1, 2), (0, 1)]
    assert told.update == tuple(0.5 + n for n in (64 * 33, 128 * 65, 10 * 129))
    assert (told.data, told.lanes, told.contention) == (0.25, 3, 0.5)
    assert told.compute == 18.25


def test_gradients_may_be_complete_in_any_order() -> None:
    """A unit that is used last and complete last: nobody else waits for it."""
    known = hand_made()
    late = hand_made(complete={**known.complete, "third.weight": 12})
    told = scenario(units(), SHAPES, late)
    assert [a.backward for a in told.layers] == [0, 1, 3, 8]
    assert told.compute == 18
    ready = {job.unit: sum(a.backward for a in told.layers[job.ready :]) for job in told.jobs}
    assert ready == {2: 12, 1: 8, 0: 11}


def test_what_was_not_seen_is_needed_at_once_and_complete_last() -> None:
    told = scenario(units(), SHAPES, hand_made(touched={}, complete={}))
    assert [a.forward for a in told.layers] == [0, 0, 0, 6]
    assert {sum(a.backward for a in told.layers[job.ready :]) for job in told.jobs} == {12}


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "terngrad", "topk(0.01)", "powersgd(rank=4)", "acpsgd"])
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_that_the_codec_counts(codec: str, world: int) -> None:
    others = ["ring", "gather-scatter"] if codec in ("bf16", "int8") else []
    for carrier in (*exchanges_to_weigh(codec, world), *others):
        told = scenario(units(codec, carrier), SHAPES, hand_made(world=world))
        built, link = codecs.build(codec), exchange.build(carrier)
        for name, job in zip(("third", "second", "first"), told.jobs, strict=True):
            mine = [s for s in SHAPES if s.name.startswith(name)]
            packed = codecs.batches(built, [s.name for s in mine], [s.shape for s in mine], small=16384)
            sent = sum(
                built.wire_bytes(b.shape, world_size=world, exchange=link, packed=True, lengths=b.lengths)
                for b in packed
            )
            # Shards have scales of their own, and round up.
            close = pytest.approx(sent, rel=1e-3, abs=16 * world if carrier in ("sharded", "ring") else 1)
            assert sum(one.wire for one in job.rounds) * LINK.bytes_per_s == close


def test_parts_share_a_unit() -> None:
    whole, cut = (scenario(units("bf16", parts=n), SHAPES, hand_made()) for n in (1, 4))
    assert len(cut.jobs) == 12
    assert cut.wire == pytest.approx(whole.wire, rel=0.01)
    assert cut.jobs[0].encode == pytest.approx(0.001 + 1290 / 4 * 1e-6)
    assert whole.jobs[0].encode == pytest.approx(0.001 + 1290 * 1e-6)


def test_rounds_have_latencies_and_codec_work_between() -> None:
    (third, _, _) = scenario(units("powersgd"), SHAPES, hand_made()).jobs
    assert [one.latency for one in third.rounds] == [LINK.latency] * 2
    # The matrix and the bias beside it are two runs of the codec.
    assert third.between == pytest.approx(2 * 0.002 + 1290 * 1e-6)
    large = [Shape("a.weight", (300, 100)), Shape("b.weight", (300, 100))]
    one = Plan((Unit("both", ("a.weight", "b.weight"), "int8", "allgather"),), (("both", 0),))
    (job,) = scenario(one, large, hand_made()).jobs
    assert job.rounds[0].latency == 2 * LINK.latency, "payloads that do not add are two messages"


def test_sharded_sends_less_and_works_more() -> None:
    known = hand_made(world=4)
    gathered, sharded = (scenario(units("int8", c), SHAPES, known).jobs[1] for c in ("allgather", "sharded"))
    assert sum(r.wire for r in sharded.rounds) == pytest.approx(sum(r.wire for r in gathered.rounds) / 2, rel=0.01)
    assert len(sharded.rounds) == 2
    assert sharded.encode == gathered.encode
    assert sharded.decode == pytest.approx(gathered.decode / 4)
    share = 128 * 65 / 4
    assert sharded.between == pytest.approx(gathered.decode / 4 * 3 / 4 + 0.001 + share * 1e-6)
    assert exchanges_to_weigh("int8", 4) == ("allgather", "sharded")
    assert exchanges_to_weigh("int8", 2) == ("allgather",)
    assert exchanges_to_weigh("bf16", 4) == ("allreduce",)
    assert exchanges_to_weigh("topk(0.01)", 4)[0] == "allgather"


def test_a_codec_costs_the_same_however_it_is_spelled() -> None:
    known = hand_made(codecs={"topk( 0.01 )": HALF})
    told = scenario(default_plan(SHAPES, compress="topk(0.01)"), SHAPES, known)
    assert all(job.encode > 0.001 for job in told.jobs)


def test_a_prediction_is_what_the_simulator_says() -> None:
    plan = default_plan(SHAPES)
    told = predict(plan, SHAPES, hand_made())
    assert told == simulate(scenario(plan, SHAPES, hand_made()))
    assert predict(plan, SHAPES, hand_made(), spans=True).spans
    alone = predict(plan, SHAPES, hand_made(link=LinkCost(0.0, float("inf")), codecs={}))
    assert alone.step == alone.compute == 18


@pytest.mark.parametrize("shapes", [vgg19(), resnet50()], ids=["vgg19", "resnet50"])
@pytest.mark.parametrize("codec", ["none", "int8", "powersgd(rank=64)"])
def test_models(shapes: list[Shape], codec: str) -> None:
    plan = default_plan(shapes, compress=codec)
    told = predict(plan, shapes, costs(shapes, 0.1))
    assert told.compute == pytest.approx(0.1)
    assert told.bound <= told.step <= scenario(plan, shapes, costs(shapes, 0.1)).serial


def test_the_host_gives_a_gpu_every_launch_every_run_of_a_codec_and_every_update() -> None:
    host, coded = Host(passes=10.0, launch=0.5, update=0.25), CodecCost(issue=2.0)
    told = scenario(units("int8", "allgather", parts=2), SHAPES, hand_made(host=host, codecs={"int8": coded}))
    assert told.host == 10 + 3 * (0.25 + 2 * (0.5 + 2.0))
    # Of three matrices of three shapes a unit's codec runs three times in one launch, and once for its small tensors.
    one = Unit("all", tuple(shape.name for shape in SHAPES), "powersgd", "allreduce", 1)
    together = scenario(Plan((one,), (("all", 0),)), SHAPES, hand_made(host=host, codecs={"powersgd": coded}))
    cells = len(codecs.batches(codecs.build("powersgd"), list(one.parameters), [s.shape for s in SHAPES], small=16384))
    assert cells > 1
    assert together.host == 10 + 0.25 + 0.5 + cells * 2.0
    assert scenario(units(), SHAPES, hand_made()).host == 0
    long = scenario(units(), SHAPES, hand_made(host=Host(passes=100.0)))
    assert simulate(long).step == 100
    assert simulate(long, spans=True).step == 100
    assert simulate(long).bound < 100, "of the hardware"


def test_a_codec_known_over_one_exchange_is_not_free_over_another() -> None:
    line = Curve(1e-4, 1e-9)
    cost = CodecCost(line, Curve(), line)
    known = Costs(2, 0.01, 0.02, {}, {}, LinkCost(1e-4, 1e8), carried={"int8 over allgather": cost})
    shapes = {"w": Shape("w", (1 << 20,))}
    unit = Unit("w", ("w",), "int8", "sharded")
    made = job_of(unit, shapes, replace(known, world=8))
    assert min(made.encode, made.between, made.decode) > 0
