"""The start of a job: torch's reducer first, trials that stop early, measurements that pay, remembered plans."""

import logging
import math
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncline
from ranks import run_ranks
from syncline.engine.executors.reducer import BucketReducer
from syncline.engine.tuning import budget, drift_watch
from syncline.engine.tuning.drift import WINDOW
from syncline.engine.tuning.executor_trial import TIE, TIMED, ExecutorTrial, other_codecs, other_sizes
from syncline.engine.tuning.race import CLOSE_AT_START, LOSSY, Race, Timed
from syncline.engine.tuning.report import TuningReport
from syncline.engine.tuning.tuner import PROFILED, TUNED, WARM_UP
from syncline.engine.tuning.watch import Seen
from syncline.plan import CodecError, Errors, Plan, Shape, bucket_plan, default_plan
from syncline.plan.planner import WORTH

SHAPES = [Shape(f"{name}.weight", (1000, 1000)) for name in "abcdefgh"]
"""Of 4 MB each."""


def test_what_another_plan_can_gain_at_most() -> None:
    seen = Seen(step=1.0, passes=0.9, exposed=0.6, waiting=0.5)
    assert seen.gain(smaller=True) == 0.5, "the rest is work of the cores"
    assert seen.gain(smaller=False) == pytest.approx(0.1), "the same bytes fit behind forward pass and update only"
    assert replace(seen, waiting=0.0).gain(smaller=True) == 0


def test_measurements_wait_until_they_pay() -> None:
    cost = budget.expected_seconds(device="cpu", tensors=161, codecs=5, choose=True)
    order = budget.expected_seconds(device="cpu", tensors=161, codecs=1, choose=False)
    assert order < cost < 10
    after = partial(budget.pays_after, cost)
    assert after(gain=0.6, step=1.0) == 0, "ten steps repay it"
    assert after(gain=0.02, step=1.0) == cost / budget.SHARE
    assert after(gain=0.1, step=0.2) == 2 * cost / budget.REPAID, "half of the step, for four times as long"


def test_a_trial_stops_early() -> None:
    first, second, third = (bucket_plan(SHAPES, bucket_bytes=size) for size in (1 << 30, 8 << 20, 1 << 10))
    trial = ExecutorTrial([first], then=[lambda best: [second, third, first]])
    assert [trial.due(count) for count in range(TIMED + 1)] == [False, True, *[False] * (TIMED - 2), True]
    assert not trial.add(Seen(1.0), 1), "the first plan is timed to the end"
    assert trial.add(Seen(1.0), TIMED)
    assert trial.current is second
    assert trial.add(Seen(1.6), 1), "much slower after one step"
    assert trial.current is third
    assert not trial.add(Seen(1.4), 1), "a single step varies so much where ranks share cores"
    assert trial.add(Seen(0.995), TIMED)
    assert trial.current is None, "a plan that was timed is not tried again"
    assert trial.fastest().plan is first, "half a percent is noise"
    half = bucket_plan(SHAPES, codec="bf16")
    codecs = ExecutorTrial([first, half])
    assert codecs.add(Seen(1.0), TIMED)
    assert codecs.add(Seen(0.98), TIMED)
    assert codecs.fastest().plan is first, "what BF16 loses is worth more than 2%"
    needy = ExecutorTrial([first], then=[lambda best: [second]], enough=lambda one: one.step > 2)
    assert needy.add(Seen(3.0), 1)
    assert needy.current is None


def lossy() -> tuple[dict[str, Plan], Errors]:
    """Plans that lose nothing, a rounding, and measured errors, and these errors."""
    plans = {codec: bucket_plan(SHAPES, codec=codec) for codec in ("none", "bf16")}
    plans |= {codec: default_plan(SHAPES, compress=codec) for codec in ("int8", "int4", "terngrad")}
    lost = {"int8": 1e-5, "int4": 4e-3}
    rows = {codec: {shape.name: CodecError(error, error) for shape in SHAPES} for codec, error in lost.items()}
    return plans, Errors({shape.name: 1.0 for shape in SHAPES}, rows)


def test_what_a_timed_plan_loses() -> None:
    plans, errors = lossy()
    timed = [Timed(plan, Seen(1.0), errors) for plan in plans.values()]
    assert [one.lost for one in timed] == sorted({one.lost for one in timed}), "each more than the one before"
    assert timed[0].lost == 0
    assert timed[3].lost == pytest.approx(4e-3)
    assert timed[4].lost == Timed(plans["int8"], Seen(1.0)).lost == math.inf, "it was not measured"
    assert Timed(plans["bf16"], Seen(1.0)).lost == timed[1].lost, "a rounding is known"
    units = [*plans["none"].units[:1], *plans["bf16"].units[1:]]
    assert 0 < Timed(Plan(tuple(units), plans["bf16"].order), Seen(1.0)).lost <= timed[1].lost


@pytest.mark.parametrize(("before", "after"), [("none", "bf16"), ("none", "int4"), ("bf16", "int4"), ("int8", "int4")])
def test_a_plan_that_loses_more_has_to_be_clearly_faster(before: str, after: str) -> None:
    plans, errors = lossy()
    first, second = plans[before], plans[after]

    def stays(order: list[Plan], steps: tuple[float, float]) -> Plan:
        trial = ExecutorTrial(order, errors=errors)
        for step in steps:
            assert trial.add(Seen(step), TIMED)
        return trial.fastest().plan

    assert stays([first, second], (1.0, 1.001 * (1 - WORTH))) is first
    assert stays([first, second], (1.0, 0.999 * (1 - WORTH))) is second
    assert stays([second, first], (1.0, 0.999 * (1 - TIE))) is first, "what loses less only has to be faster"

    def wins(step: float) -> Plan:
        race = Race(Timed(first, Seen(1.0), errors), [Timed(second, Seen(1.0), errors)])
        return raced(race, {first: [1.0] * 3, second: [step] * 3})[-1]

    assert wins(1.001 * (1 - LOSSY)) is first
    assert wins(0.999 * (1 - LOSSY)) is second


def test_of_the_plans_that_the_fastest_does_not_clearly_beat_the_one_that_loses_least_stays() -> None:
    plans, errors = lossy()
    dense, half, eighth = (plans[codec] for codec in ("none", "bf16", "int4"))
    timed = [Timed(plan, Seen(1.0), errors) for plan in (eighth, dense, half)]

    def wins(*steps: float) -> Plan:
        times = {plan: [step] * 3 for plan, step in zip((dense, half, eighth), steps, strict=True)}
        return raced(Race(timed[0], timed[1:]), times)[-1]

    assert wins(1.0, 0.985, 0.985) is dense, "neither gains 2%"
    assert wins(1.0, 0.97, 0.96) is half, "int4 gains too little on BF16"
    assert wins(1.0, 0.985, 0.97) is half, "the same, whatever the dense plan takes"
    assert wins(1.0, 0.981, 0.979) is half
    assert wins(1.0, 0.97, 0.93) is eighth

    def stays(*steps: float) -> Plan:
        trial = ExecutorTrial([dense, half, eighth], errors=errors)
        for step in steps:
            assert trial.add(Seen(step), TIMED)
        return trial.fastest().plan

    assert stays(1.0, 0.98, 0.96) is half
    assert stays(1.0, 0.98, 0.98) is dense
    assert stays(1.0, 0.98, 0.94) is eighth


def test_the_fastest_plan_without_the_reducer_is_known_whatever_wins() -> None:
    plans, errors = lossy()
    trial = ExecutorTrial([plans["none"], plans["int8"], plans["int4"]], errors=errors)
    assert trial.fastest_of_ours() is None
    for step in (1.0, 1.3, 1.2):
        trial.add(Seen(step), TIMED)
    assert trial.fastest().plan is plans["none"]
    ours = trial.fastest_of_ours()
    assert ours is not None
    assert ours.plan is plans["int4"]


def raced(race: Race, times: dict[Plan, list[float]]) -> list[Plan]:
    """Run a race whose windows take these times; the plans that ran, and the winner."""
    ran = []
    while not race.over:
        assert race.current is not None
        ran.append(race.current.plan)
        race.add(times[race.current.plan].pop(0))
    assert race.current is not None
    return [*ran, race.current.plan]


def test_plans_that_were_close_in_a_trial_run_in_turns() -> None:
    first, second, third = (bucket_plan(SHAPES, bucket_bytes=size) for size in (1 << 30, 8 << 20, 1 << 10))
    trial = ExecutorTrial([first, second, third])
    for step in (1.0, 1.05, 1.5):
        trial.add(Seen(step), TIMED)
    there_and_back = [first, second, second, first]
    assert raced(trial.race(), {first: [1.0, 1.0], second: [0.99, 0.99]}) == [*there_and_back, second]
    assert raced(trial.race(), {first: [1.0, 0.98], second: [0.99, 0.99]}) == [*there_and_back, first]
    assert raced(trial.race(), {first: [1.0], second: [0.9]}) == [first, second, second], "far behind"
    assert raced(trial.race(), {first: [0.9]}) == [first, first], "no other was as fast in the trial"
    slow = {first: [1.4], second: [1.0], third: [1.2]}
    assert raced(trial.race(), slow) == [first, second, third, second], "the trial was wrong about the first"
    assert ExecutorTrial([], timed=[Timed(first, Seen(1.0))]).race().over


def test_a_race_ends_when_a_single_plan_is_left() -> None:
    plans, errors = lossy()
    first, second = plans["int8"], plans["int4"]
    race = Race(Timed(first, Seen(1.0), errors), [Timed(second, Seen(1.0), errors)])
    assert raced(race, {first: [1.0, 9.0, 9.0], second: [1.2]}) == [first, second, first], "not two windows more"


def test_a_race_is_disturbed_by_drift_and_not_by_a_slow_plan() -> None:
    first, second = (bucket_plan(SHAPES, bucket_bytes=size) for size in (1 << 30, 8 << 20))
    race = Race(Timed(first, Seen(1.0)), [Timed(second, Seen(1.05))])
    assert not race.disturbed(2.0), "the first window is all that is known"
    race.add(1.0)
    assert not race.disturbed(1.36), "slower than in its trial by less than 30%"
    assert race.disturbed(1.4)
    slow = Race(Timed(first, Seen(0.04)), [Timed(second, Seen(0.055))], close_if_short=CLOSE_AT_START)
    slow.add(0.04)
    assert not slow.disturbed(0.06), "it was slow in its trial"


def test_short_steps_get_a_second_chance_at_the_start_since_a_trial_times_few_of_them() -> None:
    dense, half = (bucket_plan(SHAPES, codec=codec) for codec in ("none", "bf16"))
    trial = ExecutorTrial([dense, half])
    for step in (0.04, 0.05):
        trial.add(Seen(step), TIMED)
    assert trial.fastest().plan is dense
    times = {dense: [0.04] * 3, half: [0.03] * 3}
    first = trial.race(close_if_short=CLOSE_AT_START)
    assert raced(first, times)[-1] is half, "25% slower in three steps, and 25% faster over windows"
    assert raced(trial.race(), {dense: [0.04]}) == [dense, dense], "later a race would delay the detection of drift"


def test_bf16_has_to_be_faster_than_dense_over_windows_too() -> None:
    dense, half = (bucket_plan(SHAPES, codec=codec) for codec in ("none", "bf16"))
    trial = ExecutorTrial([dense, half])
    for step in (1.0, 0.95):
        trial.add(Seen(step), TIMED)
    assert trial.fastest().plan is half
    chance = {half: [0.95] * 3, dense: [0.96] * 3}
    assert raced(trial.race(), chance)[-1] is dense, "5% in a few steps were chance"
    assert raced(trial.race(), {half: [0.95, 0.96, 0.97], dense: [0.99, 1.0, 1.0]})[-1] is half
    slow_windows = {half: [0.95, 0.96, 0.93], dense: [1.2, 0.94, 1.2]}
    assert raced(trial.race(), slow_windows)[-1] is dense, "faster in one round: the machine was busy in the others"
    disturbed = {half: [0.95, 0.96, 0.95], dense: [1.1, 1.0, 1.0]}
    ran = raced(trial.race(), disturbed)
    assert ran == [half, dense, dense, half, half, dense, half], "dense gets all its windows, though it seems behind"
    assert raced(trial.race(), {half: [0.8]}) == [half, half], "a clear gain"


def test_other_buckets_are_tried_only_if_there_is_a_wait() -> None:
    arrival = (7.0, 6.0, 4.0, 5.0, 3.0, 2.0, 1.0, 0.0)
    waits = Timed(bucket_plan(SHAPES), Seen(1.0, exposed=0.5, arrival=arrival))
    (half,) = other_codecs(waits, SHAPES)
    assert {unit.codec for unit in half.units} == {"bf16"}
    assert [name[0] for unit, _ in half.order for name in reversed(_parameters(half, unit))] == list("hgfecdba")
    assert len({plan.hash for plan in other_sizes(waits, SHAPES)}) > 1
    free = replace(waits, seen=replace(waits.seen, exposed=0.01))
    assert other_codecs(free, SHAPES) == other_sizes(free, SHAPES) == []


def _parameters(plan: Any, unit: str) -> list[str]:
    return list(next(row.parameters for row in plan.units if row.name == unit))


def test_the_report_is_a_sentence() -> None:
    assert str(TuningReport(cost=0.5, steps=14, before=0.9, after=0.4)) == (
        "tuning took 0.50 s in 14 steps; a step takes 400.0 ms instead of 900.0 ms with DDP's buckets"
    )
    assert str(TuningReport(before=0.3, after=0.3, remembered=True)) == (
        "the plan of an earlier run is used; there a step took 300.0 ms, as with DDP's buckets"
    )
    assert str(TuningReport(cost=1.0, steps=5, after=0.1)) == "tuning took 1.00 s in 5 steps; a step takes 100.0 ms"


class Log(logging.Handler):
    """What the engine has said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("syncline").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def trained(net: Any, parameters: Any, rank: int, steps: int, *, before: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    sync = None if before is None else before(optimizer)
    losses = []
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 10 + rank))
        loss = (net(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if sync is not None:
        sync.wait()
    return losses


def starts(rank: int, world: int, folder: str) -> dict[str, Any]:
    import_module("syncline.engine.attach").START = "reducer"
    # A busy machine must look neither like another network nor like a job that has changed.
    drift_watch.message_seconds = lambda *_, **__: 1e-3  # type: ignore[assignment]
    drift_watch.DriftWatch.add_window = lambda *_: False  # type: ignore[method-assign]
    said, found = Log(), {}
    plain = model()
    reference = trained(DistributedDataParallel(plain), plain.parameters(), rank, TUNED)

    def job(name: str, steps: int, **options: Any) -> Any:
        net, made = model(), []
        said.lines.clear()

        def attached(optimizer: Any) -> Any:
            made.append(syncline.attach(net, optimizer, **options))
            found[name] = {"first": made[0].plan.executor, "settled": made[0].auto.settled}
            return made[0]

        losses = trained(net, net.parameters(), rank, steps, before=attached)
        (sync,) = made
        auto = sync.auto
        found[name] |= {
            "losses": losses == reference[:steps],
            "plan": (sync.plan.executor, sync.plan.hash),
            "planned_at": auto.planned_at,
            "costs": auto.costs is not None,
            "settled_last": auto.settled,
            "remembered": auto.report.remembered,
            "why": auto.choice.why if auto.choice is not None else "",
            "said": list(said.lines),
        }
        sync.close()
        return sync

    cache = Path(folder) if rank == 0 else False  # rank 0 decides for all
    job("dense", TUNED, plan_cache=False)
    job("remembers", TUNED, plan_cache=cache)
    job("again", 4, plan_cache=cache)
    job("full", WARM_UP + PROFILED + 1, plan_cache=cache, tune="full")
    job("other request", 2, plan_cache=cache, compress="bf16")
    if rank == 0:
        for file in Path(folder).iterdir():
            file.write_text("[")
    job("damaged", 2, plan_cache=cache)
    job("unwritable", TUNED, plan_cache=Path("/proc/nowhere") if rank == 0 else False, compress="bf16")

    original = BucketReducer.finish

    def late(self: Any, *given: Any, **named: Any) -> None:
        time.sleep(0.2)  # a network that is waited for, with idle cores
        original(self, *given, **named)

    BucketReducer.finish = late  # type: ignore[method-assign]
    try:
        job("slow network", WARM_UP + 1 + PROFILED + TIMED + 2, compress="auto(int8)", plan_cache=False)
    finally:
        BucketReducer.finish = original  # type: ignore[method-assign]
    return found


@pytest.mark.timeout(110)
def test_jobs_start_as_ddp_does_and_remember_their_plan(tmp_path: Path) -> None:
    first, second = run_ranks(starts, 2, str(tmp_path / "plans"), timeout=100)
    for name, one in first.items():
        two = second[name]
        same = {key: one[key] for key in one if key != "said"}
        assert same == {key: two[key] for key in two if key != "said"}, f"{name}: all ranks take the same decisions"
    dense = first["dense"]
    assert dense["first"] == "reducer"
    assert dense["losses"], "DDP's, bit for bit"
    assert dense["settled_last"]
    assert len(dense["planned_at"]) == 1
    assert dense["planned_at"][0] <= TUNED
    assert not dense["remembered"]
    assert not dense["costs"], "no measurement pays on this network"
    assert "another plan could save at most" in dense["why"]
    again = first["again"]
    assert not first["remembers"]["remembered"]
    assert again["settled"]
    assert again["remembered"]
    assert again["planned_at"] == [0]
    assert again["plan"] == first["remembers"]["plan"]
    assert again["losses"]
    assert not first["other request"]["remembered"]
    damaged = first["damaged"]
    assert not damaged["remembered"]
    assert sum("is ignored" in line for line in damaged["said"]) == 1
    assert sum("is not remembered" in line for line in first["unwritable"]["said"]) == 1
    full = first["full"]
    assert not full["remembered"], "`full` measures, also where a plan is remembered"
    assert full["first"] == "overlap"
    assert full["planned_at"] == [WARM_UP + PROFILED]
    assert full["costs"]
    slow = first["slow network"]
    assert slow["first"] == "reducer"
    assert slow["planned_at"] == [WARM_UP + 1 + PROFILED], "one watched step was enough"
    assert slow["costs"]
    assert not second["damaged"]["said"]


def unlike(rank: int, world: int, folder: str) -> list[bool]:
    """Two runs of a job on machines with different numbers of cores."""
    import_module("syncline.engine.attach").START = "reducer"
    import_module("syncline.engine.tuning.plan_memory").available_cores = lambda: 4 + rank
    remembered = []
    for steps in (TUNED, 2):
        net, made = model(), []

        def attached(optimizer: Any, net: Any = net, made: Any = made) -> Any:
            made.append(syncline.attach(net, optimizer, plan_cache=Path(folder) if rank == 0 else False))
            return made[0]

        trained(net, net.parameters(), rank, steps, before=attached)
        remembered.append(made[0].auto.report.remembered)
        made[0].close()
    return remembered


def test_plans_are_remembered_where_ranks_have_unlike_machines(tmp_path: Path) -> None:
    assert run_ranks(unlike, 2, str(tmp_path)) == [[False, True]] * 2


def unsuitable(rank: int, world: int) -> list[tuple[Any, ...]]:
    """Loops that torch's reducer cannot run, from some step on."""
    import_module("syncline.engine.attach").START = "reducer"
    return [unsuitable_from(rank, at) for at in (WARM_UP + 1, WARM_UP + TIMED + 2)]


def unsuitable_from(rank: int, at: int) -> tuple[Any, ...]:
    ends = []
    for attached in (False, True):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        sync = syncline.attach(net, optimizer) if attached else None
        plain = net if attached else DistributedDataParallel(net)
        for step in range(TUNED):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 10 + rank))
            if attached and step == at:
                (net(x) - x).square().mean().backward(create_graph=True)
            else:
                (plain(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if sync is not None:
            sync.wait()
            facts = sync.plan.executor, sync.auto.settled, sync.auto.costs is not None
            sync.close()
        ends.append([p.detach().clone() for p in net.parameters()])
    equal = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    return (*facts, equal)


def drifting(rank: int, world: int) -> tuple[list[int], int, str]:
    """A job that was never measured, on a network that becomes slow."""
    import_module("syncline.engine.attach").START = "reducer"
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = syncline.attach(net, optimizer)
    original, changed = BucketReducer.finish, TUNED + WINDOW
    seconds = 1e-3

    def late(self: Any, *given: Any, **named: Any) -> None:
        time.sleep(5 * seconds)
        original(self, *given, **named)

    BucketReducer.finish = late  # type: ignore[method-assign]
    drift_watch.message_seconds = lambda *_, **__: seconds  # type: ignore[assignment]
    for step in range(changed + 4 * WINDOW + TUNED):
        if step == changed:
            seconds = 3e-3
        net(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = list(sync.auto.planned_at), changed, sync.plan.executor
    sync.close()
    return found


@pytest.mark.timeout(60)
def test_a_job_that_was_never_measured_is_watched_again_when_the_network_changes() -> None:
    (planned, changed, executor), (other, _, _) = run_ranks(drifting, 2)
    assert planned == other
    first, second = planned
    assert first <= TUNED
    assert changed < second <= changed + 3 * WINDOW + TUNED
    assert executor == "reducer"


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_loop_that_the_reducer_cannot_run_is_tuned_without_it() -> None:
    assert run_ranks(unsuitable, 2) == [[("overlap", True, True, True)] * 2] * 2


def test_default_plans_are_ddps_buckets_where_the_reducer_can_send_them() -> None:
    first_plan = import_module("syncline.engine.attach")._first_plan
    net = model()
    shapes = [Shape(name, tuple(p.shape)) for name, p in net.named_parameters()]
    for codec in (None, "bf16", "fp16"):
        plan = first_plan(net, shapes, default_plan(shapes, compress=codec))
        assert plan.executor == "reducer"
        assert {unit.codec for unit in plan.units} == {codec or "none"}
    for given in ({"compress": "int8"}, {"exchange": "ring"}, {"compress": "powersgd(rank=2)"}):
        plan = default_plan(shapes, **given)
        assert first_plan(net, shapes, plan) is plan
    waves = nn.Linear(8, 8, dtype=torch.complex64)
    assert first_plan(waves, shapes, default_plan(shapes)).executor == "overlap", "torch's reducer takes none"


def free_network(rank: int, world: int) -> tuple[set[str], str, bool, str]:
    """A job with much compute for its bytes, on the loopback interface as it is."""
    import_module("syncline.engine.attach").START = "reducer"
    net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = syncline.attach(net, optimizer, compress="auto", plan_cache=False)
    assert sync.auto is not None
    for _ in range(TUNED + 25 * WINDOW):  # as long as it takes at most
        if sync.auto.settled and sync.auto.confirmed:
            break
        net(torch.ones(8192, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sync.auto.choice is not None
    found = {unit.codec for unit in sync.plan.units}, sync.plan.executor, sync.auto.settled, sync.auto.choice.why
    sync.close()
    return found


@pytest.mark.alone
@pytest.mark.timeout(60)
def test_auto_does_not_compress_on_a_network_that_costs_nothing() -> None:
    for codecs, executor, settled, why in run_ranks(free_network, 2):
        assert settled
        assert codecs == {"none"}, why
        assert executor == "reducer"
        assert "another plan could save at most" in why
