"""Errors of codecs against plain arithmetic, divided among ranks, and samples of running launches."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline.engine.launch.batches import launch_batches
from syncline.engine.launch.samples import LaunchSamples
from syncline.engine.launch.units import Slot
from syncline.engine.tuning.error_watch import STEPS, ErrorWatch
from syncline.engine.tuning.measure_errors import GradientHistory, codec_error, shares
from syncline.plan.predict import built

NUMBERS = torch.Generator().manual_seed(0)


def gradients(rows: int, columns: int, steps: int = 3) -> list[torch.Tensor]:
    return [torch.randn(rows, columns, generator=NUMBERS) * 0.1 + 1.0 for _ in range(steps)]


def int8_by_hand(x: np.ndarray, block: int = 256) -> np.ndarray:
    """Round to 127 steps of the largest magnitude of each block."""
    out = np.empty_like(x)
    for at in range(0, x.size, block):
        part = x[at : at + block]
        scale = np.abs(part).max() / 127
        out[at : at + block] = np.round(part / scale) * scale
    return out


def test_a_quantizer_loses_what_plain_arithmetic_says() -> None:
    steps = gradients(40, 30)
    residual, total, first = np.zeros(1200), np.zeros(1200), 0.0
    for number, grad in enumerate(steps):
        x = grad.numpy().astype(np.float64).ravel()
        sent = int8_by_hand(x + residual)
        residual, total = x + residual - sent, total + x
        if number == 0:
            first = (residual**2).sum()
            one_step = first / (x**2).sum()
    energy, found = codec_error("int8", steps)
    assert energy == pytest.approx((total**2).sum(), rel=1e-4)
    assert found.one_step == pytest.approx(one_step, rel=0.01)
    assert found.with_feedback == pytest.approx((residual**2).sum() / (total**2).sum(), rel=0.01)
    assert found.residual_growth == pytest.approx((residual**2).sum() / first, rel=0.02)


def test_a_low_rank_codec_is_exact_on_low_rank_gradients_and_loses_most_of_orthogonal_ones() -> None:
    numbers = torch.Generator().manual_seed(3)
    low = [torch.randn(64, 2, generator=numbers) @ torch.randn(2, 48, generator=numbers) for _ in range(1)] * 3
    _, exact = codec_error("powersgd(rank=4)", low)
    assert exact.one_step < 1e-9
    assert exact.with_feedback < 1e-9
    q, _ = torch.linalg.qr(torch.randn(64, 64, generator=numbers))
    _, lossy = codec_error("powersgd(rank=4)", [q] * 3)
    # Four of 64 equal singular values in each step, other ones each time: the residual holds what was not sent.
    assert lossy.one_step == pytest.approx(60 / 64, rel=0.01)
    assert lossy.with_feedback > 0.5
    assert lossy.residual_growth > 2


def test_no_codec_loses_a_gradient_of_zero_and_a_broken_one_loses_all() -> None:
    _, nothing = codec_error("int4", [torch.zeros(8, 8)] * 3)
    assert (nothing.one_step, nothing.with_feedback) == (0.0, 0.0)
    broken = torch.zeros(8, 8)
    broken[0, 0] = torch.nan
    _, lost = codec_error("int4", [broken] * 3)
    assert lost.with_feedback > 1


def test_small_values_beside_an_outlier_are_lost_at_a_small_squared_error() -> None:
    numbers = torch.Generator().manual_seed(5)
    steps = [torch.randn(64, 64, generator=numbers) for _ in range(3)]
    _, even = codec_error("int8", steps)
    assert even.lost_values < 0.01
    for step in steps:
        step[:, 0] *= 1e4
    _, found = codec_error("int8", steps)
    assert found.with_feedback < 1e-3
    assert found.lost_values > 0.5
    for step in steps:
        step.zero_()
    _, nothing = codec_error("int8", steps)
    assert nothing.lost_values == 0.0


def test_gradients_of_zero_are_not_measured() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(8)), "b": nn.Parameter(torch.ones(8))})
    slots = []
    for index, (name, parameter) in enumerate(model.items()):
        parameter.grad = torch.full((8,), float(index))
        slot = Slot(name, parameter, index, parameter.detach())
        slot.unit = SimpleNamespace(row=SimpleNamespace(codec="none"))  # type: ignore[assignment]
        slots.append(slot)
    groups = SimpleNamespace(gather=lambda table: table[None])
    engine: Any = SimpleNamespace(slots=slots, world=1, rank=0, groups=groups)
    history = GradientHistory(engine)
    for _ in range(3):
        history.add()
    found = history.measure(engine, ["int8"])
    assert set(found.energy) == set(found.codecs["int8"]) == {"b"}


def test_parameters_are_divided_evenly() -> None:
    sizes = [1000, 10, 900, 500, 400, 30]
    slots = []
    for index, size in enumerate(sizes):
        parameter = nn.Parameter(torch.zeros(size))
        slots.append(Slot(str(index), parameter, index, parameter.detach()))
    parts = shares(slots, 3)
    assert sorted(slot.index for part in parts for slot in part) == list(range(len(sizes)))
    loads = [sum(slot.parameter.numel() for slot in part) for part in parts]
    assert max(loads) - min(loads) <= 100


@pytest.mark.parametrize(("spec", "parts"), [("int8", 1), ("int8", 3), ("powersgd(rank=2)", 1)])
def test_samples_are_values_of_the_gradients_at_the_same_places(spec: str, parts: int) -> None:
    shapes = [(32, 16), (32,), (16, 8), (32, 16)]
    grads = [torch.arange(torch.Size(shape).numel()).view(shape).float() + 1000 * n for n, shape in enumerate(shapes)]
    seen = []
    for batches in launch_batches(built(spec), [f"p{n}" for n in range(4)], shapes, parts):
        samples = LaunchSamples(batches, torch.device("cpu"), most=200, steps=range(1))
        states = [{"error": batch.pack(grads).clone()} for batch in batches]
        for _ in range(2):
            samples.before(grads)
            samples.after([2 * grad for grad in grads], states)
        assert samples.count > 0
        assert torch.equal(samples.averaged, 2 * samples.own), "summed over two passes"
        assert torch.equal(samples.residual, samples.own / 2), "of the last pass, place by place"
        seen += (samples.own / 2).tolist()
    known = {value for grad in grads for value in grad.flatten().tolist()}
    assert set(seen) <= known
    assert len({value // 1000 for value in seen}) == 4, "of all parameters"


def watched(rank: int, world: int, spec: str, outlier: float = 1.0) -> dict[str, Any]:
    """Watch a running codec; the true error is found from gradients that each rank knows of all ranks."""
    model = nn.Linear(96, 64, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = syncline.attach(model, optimizer, compress=spec, tune=False, sentinel=0)
    total, received, watch, found = torch.zeros(64, 96), torch.zeros(64, 96), None, None
    for step in range(STEPS + 5):
        if step == 2:
            watch = ErrorWatch(sync, sync.units, jump=0.5 + rank)
        grads = [torch.randn(64, 96, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(world)]
        for grad in grads:
            grad[:, 0] *= outlier
        (model.weight * grads[rank]).sum().backward()
        if 2 <= step < 2 + STEPS:
            total += sum(grads) / world  # type: ignore[arg-type]
            received += model.weight.grad
        optimizer.step()
        if watch is not None and found is None:
            found = watch.after_step()
        optimizer.zero_grad()
    sync.wait()
    residual = sync.state_dict().get("weight.error")
    sync.close()
    assert found is not None
    readings, jump = found
    return {
        "read": readings["weight"],
        "jump": jump,
        "true": float((total - received).square().sum() / total.square().sum()),
        "residual": residual is not None,
    }


@pytest.mark.parametrize("spec", ["terngrad", "powersgd(rank=4)", "int4"])
def test_a_watched_unit_reads_the_error_of_the_averaged_gradient(spec: str) -> None:
    first, second = run_ranks(watched, 2, spec)
    assert first["read"] == second["read"], "the same on all ranks"
    assert first["jump"] == second["jump"] == pytest.approx(1.0)
    if not first["residual"]:
        assert first["read"].error == pytest.approx(first["true"], rel=0.3)
    else:
        assert first["read"].error >= first["true"] / 2 * 0.7, "what the window misses, or more that was held back"


def test_a_watched_unit_reads_the_share_of_lost_values() -> None:
    for outlier, low, high in ((1.0, 0.0, 0.05), (1e4, 0.8, 1.0)):
        for found in run_ranks(watched, 2, "int8", outlier):
            assert low <= found["read"].lost_values <= high
            assert found["read"].error < 1e-3
