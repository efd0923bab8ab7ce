"""Errors of codecs on real ranks: `auto` refuses codecs that lose too much, and steps back when gradients change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline
from ranks import run_ranks
from syncline.engine.tuning import codec_guard, tuner
from syncline.engine.tuning.error_watch import STEPS
from syncline.plan import LinkCost
from syncline.plan.errors import ADAPTIVE_ERROR, DEFAULT_ERROR, ROUNDING

SIZE = 64
CHECK = 6
"""Steps between two checks of the guard in these tests."""
SLOW = LinkCost(latency=1e-5, bytes_per_s=2e5)
"""A network on which nothing but few bytes helps."""


class ToTarget(nn.Module):
    """The gradient of each weight is its distance to a target, and some noise of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(SIZE, SIZE)) for _ in range(2)])

    def forward(self, target: Tensor) -> Tensor:
        out: Tensor = sum((weight - target).square().mean() for weight in self.weights)  # type: ignore[assignment]
        return out


def low_rank() -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(SIZE, 2, generator=numbers) @ torch.randn(2, SIZE, generator=numbers)


def full_rank() -> Tensor:
    """An orthogonal matrix: all singular values are equal, so a few of them hold little."""
    q, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)))
    return q * 8.0


def train(
    steps: int,
    targets: Any,
    *,
    compress: str | None,
    rate: float = 20.0,
    folder: str | bool = False,
    keep: Any = lambda _: None,
    kind: type[nn.Module] = ToTarget,
    adam: bool = False,
) -> dict[str, Any]:
    """Train on a network that measures as slow; returns losses, plans and changes."""
    measure_costs, every, window, buckets = (
        tuner.measure_costs, codec_guard.EVERY, tuner.WINDOW, tuner.reducer_plans
    )  # fmt: skip
    tuner.reducer_plans = lambda *_: []  # on this machine's real network it would win
    tuner.measure_costs = lambda *given: replace(measure_costs(*given), link=SLOW)  # type: ignore[assignment]
    codec_guard.EVERY = CHECK
    tuner.WINDOW = 1_000_000  # a busy machine must not look like drift
    torch.manual_seed(0)
    model = kind()
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=rate)
    sync = syncline.attach(model, optimizer, compress=compress, plan_cache=folder, tune=compress is not None)
    losses, codecs, totals, by_parameter = [], [], [], []
    try:
        for step in range(steps):
            loss = model(targets(step))
            loss.backward()
            keep(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if sync.auto is not None and sync.auto.guard is not None:
                totals.append(sync.auto.guard.rules.total)
            codecs.append(sorted({unit.codec for unit in sync.plan.units}))
            last = {name: unit.codec for unit in sync.plan.units for name in unit.parameters}
            by_parameter.append(last)
        sync.wait()
        found = {"losses": losses, "codecs": codecs, "totals": totals, "about": dict(sync.plan.about)}
        found["by_parameter"] = by_parameter
        found["weights"] = [float(v) for p in model.parameters() for v in p.detach().flatten()[:50]]
        if sync.auto is not None and compress is not None:
            found["changes"] = [(c.step, c.unit, c.before, c.after) for c in sync.auto.changes]
            found["planned_at"], found["why"] = sync.auto.planned_at, sync.auto.choice.why
        sync.close()
    finally:
        tuner.measure_costs, codec_guard.EVERY, tuner.WINDOW = measure_costs, every, window
        tuner.reducer_plans = buckets
    return found


def adversarial(rank: int, world: int) -> list[dict[str, Any]]:
    noise = torch.Generator().manual_seed(rank)
    steps = 20

    def target(step: int) -> Tensor:
        return full_rank() + 0.1 * torch.randn(SIZE, SIZE, generator=noise.manual_seed(1000 * rank + step))

    return [train(steps, target, compress=spec) for spec in ("auto(powersgd(rank=4))", None)]


@pytest.mark.timeout(90)
def test_a_low_rank_codec_is_refused_on_gradients_of_full_rank() -> None:
    ranks = run_ranks(adversarial, 2, timeout=80)
    for auto, dense in ranks:
        assert auto["planned_at"], "measured and planned"
        assert "powersgd(rank=4)" not in {codec for codecs in auto["codecs"] for codec in codecs}
        assert "which loses more than the error budget" in auto["why"]
        assert auto["losses"] == pytest.approx(dense["losses"], rel=0.01)
    assert ranks[0][0]["weights"] == ranks[1][0]["weights"]


CHANGE = 20
"""The step from which the target is another one."""


def changing(rank: int, world: int, steps: int) -> list[dict[str, Any]]:
    numbers = torch.Generator()

    def target(step: int) -> Tensor:
        noise = torch.randn(SIZE, 1, generator=numbers.manual_seed(1000 * rank + step))
        return (low_rank() if step < CHANGE else full_rank()) + 1e-3 * noise

    return [train(steps, target, compress=spec) for spec in ("auto(powersgd(rank=4))", None)]


@pytest.mark.timeout(90)
def test_gradients_that_become_full_rank_make_all_ranks_step_back_once_and_recover() -> None:
    ranks = run_ranks(changing, 2, 90, timeout=80)
    for auto, dense in ranks:
        assert "powersgd(rank=4)" in auto["codecs"][CHANGE - 1], "it fits as long as gradients have a low rank"
        back = [change for change in auto["changes"] if change[2] == "powersgd(rank=4)"]
        assert back, "the guard has fired"
        assert all(change[3] in ROUNDING for change in back)
        # One reading is enough: it begins at the next check, and comes three steps after its last pass.
        assert CHANGE < back[0][0] <= CHANGE + CHECK + STEPS + 4
        assert len(auto["changes"]) == len({change[1] for change in back}), "and does not oscillate"
        assert auto["losses"][-1] == pytest.approx(dense["losses"][-1], rel=0.02)
    assert ranks[0][0]["weights"] == ranks[1][0]["weights"]
    assert ranks[0][0]["changes"] == ranks[1][0]["changes"]


def returning(rank: int, world: int, steps: int) -> dict[str, Any]:
    numbers = torch.Generator()

    def target(step: int) -> Tensor:
        noise = torch.randn(SIZE, 1, generator=numbers.manual_seed(1000 * rank + step))
        return (full_rank() if CHANGE <= step < CHANGE + 15 else low_rank()) + 1e-3 * noise

    # The weights stay at zero, so the gradients are the targets.
    return train(steps, target, compress="auto(powersgd(rank=4))", rate=0.0)


@pytest.mark.timeout(90)
def test_units_come_forward_again_when_their_measured_error_fits() -> None:
    first, second = run_ranks(returning, 2, 90, timeout=80)
    assert first["changes"] == second["changes"]
    back = [change for change in first["changes"] if change[3] in ROUNDING]
    forward = [change for change in first["changes"] if change[2] in ROUNDING]
    assert back, "stepped back"
    assert forward, "and forward again"
    assert forward[0][0] > back[0][0] + 2 * CHECK - STEPS, "not before the wait was over"
    assert len(first["changes"]) <= 4
    assert "powersgd(rank=4)" in first["codecs"][-1]
    assert first["about"]["error"] <= first["about"]["error_budget"]


def remembered(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    numbers = torch.Generator()

    def target(step: int, *, full: bool) -> Tensor:
        noise = torch.randn(SIZE, 1, generator=numbers.manual_seed(1000 * rank + step))
        return (full_rank() if full else low_rank()) + 1e-3 * noise

    found = []
    for full in (False, False, True):
        made = train(
            14, lambda step, full=full: target(step, full=full), compress="auto(powersgd(rank=4))", folder=folder
        )
        found.append(made)
    return found


@pytest.mark.timeout(90)
def test_a_remembered_plan_is_used_after_its_errors_were_measured_in_this_run(tmp_path: Path) -> None:
    for first, again, other in run_ranks(remembered, 2, str(tmp_path), timeout=80):
        assert "powersgd(rank=4)" in first["codecs"][-1]
        assert again["planned_at"] == [0], "remembered"
        assert "powersgd(rank=4)" not in again["codecs"][0], "a dense start"
        assert "powersgd(rank=4)" in again["codecs"][STEPS + 1]
        assert other["planned_at"] == [0]
        assert "powersgd(rank=4)" not in {codec for codecs in other["codecs"] for codec in codecs}


def inside_budget(rank: int, world: int, steps: int) -> dict[str, Any]:
    """The averaged gradients of a run beside the true ones, which every rank can compute."""
    received: list[Tensor] = []

    def target(step: int, of: int = rank) -> Tensor:
        return full_rank() + torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1000 * of + step))

    def keep(model: ToTarget) -> None:
        received.append(torch.stack([p.grad.detach().clone() for p in model.weights]))

    found = train(steps, target, compress="auto(int8, int4)", rate=0.0, keep=keep)
    true = [sum(target(step, of) for of in range(world)) / world * -2 / SIZE**2 for step in range(steps)]
    windows = []
    for at in range(steps - STEPS + 1):
        whole = torch.stack(true[at : at + STEPS]).sum(0).expand(2, SIZE, SIZE)
        missing = whole - torch.stack(received[at : at + STEPS]).sum(0)
        windows.append(float(missing.square().sum() / whole.square().sum()))
    return found | {"windows": windows}


@pytest.mark.timeout(90)
def test_the_budget_is_respected_over_a_run() -> None:
    for found in run_ranks(inside_budget, 2, 40, timeout=80):
        assert any("int4" in codecs for codecs in found["codecs"]), "the budget is used"
        assert max(found["totals"]) > 0
        budget = found["about"]["error_budget"]
        assert max(found["totals"]) <= budget, "as the guard reads it"
        # A window begins and ends with a residual, each inside the budget.
        assert max(found["windows"]) <= 2 * budget


class MixedScales(nn.Module):
    """Regression on features of which one is 10,000 times larger than the others: Adam learns all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE)
        nn.init.zeros_(self.first.weight)
        self.true = torch.randn(SIZE, SIZE)
        self.true[0] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(SIZE)
        scale[0] = 1e4
        small = (self.first(x * scale) - x @ self.true).square().mean()
        return small + (self.second(x) - x @ self.true).square().mean()


def mixed_scales(rank: int, world: int) -> list[dict[str, Any]]:
    numbers = torch.Generator()

    def inputs(step: int) -> Tensor:
        return torch.randn(32, SIZE, generator=numbers.manual_seed(1000 * rank + step))

    specs = ("auto", None)
    return [train(80, inputs, compress=spec, rate=0.05, kind=MixedScales, adam=True) for spec in specs]


@pytest.mark.timeout(90)
def test_adam_keeps_small_values_beside_large_ones() -> None:
    for auto, dense in run_ranks(mixed_scales, 2, timeout=80):
        assert all(codecs["first.weight"] in ROUNDING for codecs in auto["by_parameter"])
        assert any(codecs["second.weight"] not in ROUNDING for codecs in auto["by_parameter"]), "where nothing is lost"
        assert sum(auto["losses"][-10:]) == pytest.approx(sum(dense["losses"][-10:]), rel=0.02)


WAKES = 16


class Sleeping(nn.Module):
    """Two weights, of which one has a gradient of zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.awake, self.asleep = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, given: tuple[Tensor, float]) -> Tensor:
        target, share = given
        return (self.awake.weight - target).square().mean() + share * (self.asleep.weight - target).square().mean()


def sleeping(rank: int, world: int) -> dict[str, Any]:
    def target(step: int) -> tuple[Tensor, float]:
        return low_rank(), float(step >= WAKES)

    return train(60, target, compress="auto(int8)", rate=20.0, kind=Sleeping)


@pytest.mark.timeout(90)
def test_a_layer_without_a_gradient_gets_a_lossy_codec_only_after_it_was_measured() -> None:
    for found in run_ranks(sleeping, 2, timeout=80):
        used = found["by_parameter"]
        assert used[WAKES]["awake.weight"] == "int8"
        assert all(codecs["asleep.weight"] in ROUNDING for codecs in used[: WAKES + STEPS])
        assert used[-1]["asleep.weight"] == "int8", "it comes forward"


class SignSGD(torch.optim.SGD):
    """A subclass of SGD that gives small values the same step as large ones."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad.sign(), alpha=1e-3)


def budgets(rank: int, world: int) -> list[float]:
    found = []
    adam = torch.optim.AdamW
    for kind, spec in ((torch.optim.SGD, "auto"), (adam, "auto"), (adam, "auto(error=0.01)"), (SignSGD, "auto")):
        model = nn.Linear(4, 4)
        sync = syncline.attach(model, kind(model.parameters(), lr=0.01), compress=spec, plan_cache=False)
        assert sync.auto is not None
        assert sync.auto.guard is not None
        found.append(sync.auto.guard.rules.budget.error)
        sync.close()
    return found


def test_optimizers_that_scale_each_value_get_a_smaller_budget() -> None:
    for found in run_ranks(budgets, 2):
        assert found == [DEFAULT_ERROR, ADAPTIVE_ERROR, 0.01, ADAPTIVE_ERROR]
