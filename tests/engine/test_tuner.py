"""`compress="auto"`: profiled, planned and planned again on real ranks, all at the same step."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from loops.models import wide_mlp
from torch import nn

import syncline
from ranks import run_ranks
from syncline.engine.tuning import drift_watch, tuner
from syncline.engine.tuning.drift import WINDOW
from syncline.engine.tuning.tuner import PROFILED, WARM_UP
from syncline.plan import Host, predict
from syncline.plan.frozen_parameters import trained


def train(rank: int, steps: int, model: nn.Module, before: Any = None, **options: Any) -> tuple[Any, list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sync = syncline.attach(model, optimizer, **options)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 10 + rank)
        x = torch.randn(8, 32, generator=generator)
        loss = (model(x) - x[:, :10]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if before is not None:
            before(sync, step)
    sync.wait()
    return sync, losses


def planned(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = wide_mlp()
    torch.manual_seed(0)
    chosen = wide_mlp()
    sync, losses = train(rank, WARM_UP + PROFILED + 14, chosen, compress="auto(int8)")
    dense, reference = train(rank, WARM_UP + PROFILED + 14, plain)
    dense.close()
    costs = sync.auto.costs
    state = torch.get_rng_state()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    third, _ = train(rank, WARM_UP + PROFILED + 2, plain)
    assert third.auto.planned_at, "tuned"
    assert torch.equal(before, torch.get_rng_state()), "probes leave the job's random numbers alone"
    third.close()
    torch.set_rng_state(state)
    found = {
        "planned_at": sync.auto.planned_at,
        "hash": sync.plan.hash,
        "why": sync.auto.choice.why,
        "codecs": {row.codec for row in sync.plan.units},
        "weights": [float(v) for p in chosen.parameters() for v in p.detach().flatten()[:50]],
        "losses": losses,
        "reference": reference,
        "touched": dict(costs.touched),
        "complete": dict(costs.complete),
        "positive": [costs.forward, costs.backward, costs.link.latency, costs.link.bytes_per_s],
        "names": [n for n, _ in chosen.named_parameters()],
    }
    sync.close()
    return found


@pytest.mark.timeout(90)
def test_auto_profiles_plans_and_continues_to_train() -> None:
    ranks = run_ranks(planned, 2, timeout=80)
    first = ranks[0]
    for found in ranks:
        assert found["planned_at"][0] == WARM_UP + PROFILED
        assert (found["hash"], found["planned_at"], found["why"]) == (first["hash"], first["planned_at"], first["why"])
        assert found["weights"] == first["weights"], "replicas stay equal"
        assert found["codecs"] <= {"none", "bf16", "int8"}
        assert all(value > 0 for value in found["positive"][:2] + found["positive"][3:])
        assert all(a == pytest.approx(b, rel=0.05) for a, b in zip(found["losses"], found["reference"], strict=True))
        # The first layer is used first, and its gradient is complete last.
        names = found["names"]
        assert found["touched"][names[0]] <= min(found["touched"].values()) + 1e-9
        assert found["complete"][names[0]] >= found["complete"][names[-2]]


class Sleepy(nn.Module):
    """A model whose forward pass takes a given time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pause = wide_mlp(), 0.02

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        out: torch.Tensor = self.inner(x)
        return out


def drifting(rank: int, world: int) -> tuple[list[int], int, list[float]]:
    torch.manual_seed(0)
    model = Sleepy()
    fired, compute = [0], []

    def slow(sync: Any, step: int) -> None:
        if step == WARM_UP + PROFILED + 2 * WINDOW + 5:
            model.pause, fired[0] = 0.05, step
        if sync.auto.costs is not None:
            compute.append(sync.auto.costs.data + sync.auto.costs.forward)

    sync, _ = train(rank, WARM_UP + PROFILED + 8 * WINDOW, model, before=slow, compress="auto(int8)")
    sync.close()
    return sync.auto.planned_at, fired[0], [compute[0], compute[-1]]


@pytest.mark.timeout(110)
@pytest.mark.alone
def test_compute_that_drifts_makes_all_ranks_profile_and_plan_again_once_at_the_same_step() -> None:
    ranks = run_ranks(drifting, 2, timeout=100)
    (planned_at, fired, compute), (other, _, _) = ranks
    assert fired > 0
    assert planned_at == other
    assert len(planned_at) == 2, planned_at
    assert fired < planned_at[1] <= fired + 3 * WINDOW + 1 + PROFILED
    assert compute[0] < 0.05 <= compute[1], "measured again"


def with_two_optimizers(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32768), nn.ReLU(), nn.Linear(32768, 10))  # one unit per layer
    first, second = (torch.optim.SGD(part.parameters(), lr=1e-4) for part in (model[0], model[2]))
    sync = syncline.attach(model, [first, second], compress="int8")
    planned_in = []
    for step in range(WARM_UP + PROFILED + 4):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * 10 + rank))
        (model(x) - x[:, :10]).square().mean().backward()
        for number, optimizer in enumerate((first, second)):
            optimizer.step()
            if sync.auto is not None and len(sync.auto.planned_at) > len(planned_in):
                planned_in.append(number)
        first.zero_grad()
        second.zero_grad()
    sync.wait()
    at = sync.auto.planned_at if sync.auto is not None else []
    sync.close()
    return {"planned_at": at, "planned_in": planned_in, "sum": float(sum(p.detach().sum() for p in model.parameters()))}


def with_an_unused_layer(rank: int, world: int) -> list[int]:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"used": nn.Linear(32, 10), "unused": nn.Linear(3000, 1000), "outside": nn.Linear(3000, 1000)}
    )
    used = [*model["used"].parameters(), *model["unused"].parameters()]
    optimizer = torch.optim.SGD(used, lr=1e-3)
    sync = syncline.attach(model, optimizer, compress="auto(int8)")
    for step in range(WARM_UP + PROFILED + 3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * 10 + rank))
        model["used"](x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.wait()
    assert sync.auto is not None
    at = list(sync.auto.planned_at)
    sync.close()
    return at


@pytest.mark.full
def test_layers_outside_all_optimizers_do_not_delay_the_plan() -> None:
    assert run_ranks(with_an_unused_layer, 2) == [[WARM_UP + PROFILED]] * 2


def test_a_plan_waits_for_the_last_of_several_optimizers() -> None:
    one, two = run_ranks(with_two_optimizers, 2)
    assert one == two
    assert one["planned_at"] == [WARM_UP + PROFILED]
    assert one["planned_in"] == [1]


def host_bound(rank: int, world: int) -> dict[str, Any]:
    measure_costs = tuner.measure_costs
    tuner.measure_costs = lambda *given: replace(measure_costs(*given), host=Host(passes=0.01, launch=0.5, update=0.5))
    found: dict[str, Any] = {}
    try:
        asked = {"dense": {}, "bf16": {"compress": "bf16"}, "int8": {"compress": "int8"}, "ring": {"exchange": "ring"}}
        for name, options in asked.items():
            torch.manual_seed(0)
            wide = (nn.Linear(512, 512) for _ in range(4))
            model = nn.Sequential(nn.Linear(32, 512), *wide, nn.Linear(512, 10))
            units: list[int] = []
            sync, _ = train(
                rank, WARM_UP + PROFILED + 2, model, lambda s, _, u=units: u.append(len(s.plan.units)), **options
            )
            planned = sync.auto.choice.plan  # torch's reducer is being tried by now
            kinds = {(row.codec, row.exchange) for row in planned.units}
            found[name] = units[0], len(planned.units), kinds, planned.hash
            sync.close()
    finally:
        tuner.measure_costs = measure_costs
    return found


@pytest.mark.full
@pytest.mark.timeout(90)
def test_a_host_bound_job_gets_fewer_launches_of_the_same_codec() -> None:
    ranks = run_ranks(host_bound, 2, timeout=80)
    assert ranks[0] == ranks[1]
    for name, codec in (("dense", "none"), ("bf16", "bf16")):
        before, after, kinds, _ = ranks[0][name]
        assert before > after
        assert after == 1
        assert kinds == {(codec, "allreduce")}
    for name, kind in (("int8", ("int8", "allgather")), ("ring", ("none", "ring"))):
        before, after, kinds, _ = ranks[0][name]
        assert before == after, "tensors that travel together share a scale, and who asks for an exchange gets it"
        assert kinds == {kind}


def frozen(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), *(nn.Linear(256, 256) for _ in range(3)), nn.Linear(256, 10))
    for layer in model[1:4]:
        layer.requires_grad_(False)
    still = [p.detach().clone() for p in model[1:4].parameters()]
    seen: dict[str, Any] = {"sent": []}

    def look(sync: Any, step: int) -> None:
        if sync.auto.planned_at and len(seen["sent"]) < len(sync.auto.planned_at):
            live = trained(sync.plan, sync.auto.shapes)
            seen["sent"].append(sorted(name for unit in live.units for name in unit.parameters))
            assert 0 < predict(live, sync.auto.shapes, sync.auto.costs).step < 10
        if step == WARM_UP + PROFILED + 1:
            sync.wait()
            seen["still"] = all(torch.equal(a, b) for a, b in zip(still, model[1:4].parameters(), strict=True))
            seen["all"] = sorted(name for unit in sync.plan.units for name in unit.parameters)
            model[1:4].requires_grad_(True)

    # Two windows: in the first some were frozen, in the second none; then the profile.
    sync, losses = train(rank, WARM_UP + PROFILED + 2 * WINDOW + PROFILED + 4, model, look, compress="auto(bf16)")
    seen["moved"] = not any(torch.equal(a, b) for a, b in zip(still, model[1:4].parameters(), strict=True))
    seen["weights"] = [float(v) for p in model.parameters() for v in p.detach().flatten()[:20]]
    seen["names"], seen["losses"] = sorted(name for name, _ in model.named_parameters()), losses
    seen["planned_at"], seen["hash"] = sync.auto.planned_at, sync.plan.hash
    sync.close()
    return seen


@pytest.mark.timeout(90)
def test_frozen_parameters_cost_nothing_in_a_plan_and_are_planned_once_unfrozen() -> None:
    ranks = run_ranks(frozen, 2, timeout=80)
    first = ranks[0]
    for seen in ranks:
        assert seen["sent"][0] == ["0.bias", "0.weight", "4.bias", "4.weight"]
        assert seen["sent"][-1] == seen["names"]
        assert seen["all"] == seen["names"], "but the plan is of the whole model"
        assert seen["still"]
        assert seen["moved"]
        for key in ("weights", "planned_at", "hash"):
            assert seen[key] == first[key], "replicas stay equal"
        assert len(seen["planned_at"]) >= 2


def taking_turns(rank: int, world: int) -> dict[str, Any]:
    drift_watch.DriftWatch.add_window = lambda *_: False  # type: ignore[method-assign]  # the machine may be busy
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(32, 64), nn.Linear(32, 64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = syncline.attach(model, optimizer, compress="auto(int8)")
    for step in range(WARM_UP + PROFILED + 2 * WINDOW + 2):
        for number, part in enumerate(model):
            part.requires_grad_(number == step % 2)
        model[step % 2](torch.ones(4, 32) * (rank + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {"live": sync.auto.planned, "planned_at": sync.auto.planned_at, "hash": sync.plan.hash}
    sync.close()
    return found


@pytest.mark.timeout(90)
def test_parts_that_train_in_turn_are_all_planned_and_planned_once() -> None:
    first, second = run_ranks(taking_turns, 2, timeout=80)
    assert first == second
    assert first["live"] == [True] * 4
    assert len(first["planned_at"]) == 1
