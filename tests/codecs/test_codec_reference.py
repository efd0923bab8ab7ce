"""Every algorithm against its NumPy reference, over ranks and steps, residuals included."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch

from syncline import codecs
from syncline.codecs import lockstep

WORLD, STEPS, COUNT = 3, 4, 1003


def grads(shape: tuple[int, ...] = (COUNT,), steps: int = STEPS) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(3)
    return [[rng.standard_normal(shape).astype(np.float32) for _ in range(WORLD)] for _ in range(steps)]


def ours(spec: str, data: list[list[np.ndarray]], **more: Any) -> codecs.Lockstep:
    first = more.get("first_step", 0)
    return lockstep(
        spec, lambda s, r: [torch.from_numpy(data[s - first][r])], steps=len(data), world_size=len(data[0]), **more
    )


DETERMINISTIC = {
    "int8(block=64)": partial(reference.blockwise, bits=8, block=64),
    "int8": partial(reference.blockwise, bits=8, block=256),
    "int4": partial(reference.blockwise, bits=4, block=64),
    "onebit": reference.onebit,
    "efsignsgd": reference.efsign,
    "tbq(tau=0.5)": partial(reference.tbq, tau=0.5),
    "topk(0.05)": partial(reference.largest, k=math.ceil(0.05 * COUNT)),
    "threshold(tau=1.5, capacity=0.1)": partial(reference.hard_threshold, tau=1.5, fits=round(0.1 * COUNT)),
    "graddrop(0.05)": partial(reference.largest, k=round(0.05 * COUNT)),
}


@pytest.mark.parametrize("spec", DETERMINISTIC)
def test_deterministic_codecs(spec: str) -> None:
    data = grads()
    mean, errors = reference.run(DETERMINISTIC[spec], data)
    got = ours(spec, data)
    np.testing.assert_allclose(got.outputs[0][0].numpy(), mean, rtol=1e-4, atol=1e-4)
    for rank in range(WORLD):
        np.testing.assert_allclose(got.states[rank]["p0.error"].numpy(), errors[rank], rtol=1e-4, atol=1e-4)


def test_none_is_the_mean() -> None:
    data = grads()
    np.testing.assert_allclose(ours("none", data).outputs[0][0].numpy(), np.mean(data[-1], axis=0), atol=1e-6)


def test_fp16_and_bf16_round_each_share_and_the_sum() -> None:
    data = grads()
    halves = [(g * np.float32(1 / WORLD)).astype(np.float16) for g in data[-1]]
    expected = (halves[0] + halves[1]) + halves[2]
    np.testing.assert_array_equal(ours("fp16", data).outputs[0][0].numpy(), expected.astype(np.float32))

    def bf16(x: np.ndarray) -> np.ndarray:
        bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return rounded.astype(np.uint32).view(np.float32)

    shares = [bf16(g * np.float32(1 / WORLD)) for g in data[-1]]
    expected = bf16(bf16(shares[0] + shares[1]) + shares[2])
    np.testing.assert_array_equal(ours("bf16", data).outputs[0][0].numpy(), expected)


def test_dgc_with_momentum_and_masking() -> None:
    data = grads(steps=6)
    mean, residuals, momenta = reference.dgc(data, k=round(0.05 * COUNT), momentum=0.9)
    got = ours("dgc(0.05)", data)
    np.testing.assert_allclose(got.outputs[0][0].numpy(), mean, rtol=1e-4, atol=1e-4)
    for rank in range(WORLD):
        np.testing.assert_allclose(got.states[rank]["p0.error"].numpy(), residuals[rank], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got.states[rank]["p0.momentum"].numpy(), momenta[rank], rtol=1e-4, atol=1e-4)


def test_dgc_takes_back_the_momentum_of_the_optimizer() -> None:
    """With SGD of momentum 0.9 the parameters are those of plain SGD, whatever the learning rate does."""
    data, found = grads(steps=8), []
    for spec, momentum in (("dgc(0.05)", 0.0), ("dgc(0.05, optimizer_momentum=0.9)", 0.9)):
        parameter, states = torch.zeros(COUNT), None
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=momentum)
        for step, both in enumerate(data):
            got = lockstep(spec, [[torch.from_numpy(g)] for g in both], states=states, first_step=step)
            states, parameter.grad = got.states, got.outputs[0][0]
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
        found.append(parameter)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert found[0].abs().max() > 0.1


def test_randomk_sends_one_value_of_each_stretch_at_the_same_places() -> None:
    data, k = grads(), math.ceil(0.05 * COUNT)
    errors = [np.zeros(COUNT, np.float32)] * WORLD
    for steps in range(1, STEPS + 1):
        got = ours("randomk(0.05, feedback=true)", data[:steps])
        output = got.outputs[0][0].numpy()
        places = np.flatnonzero(output)
        edges = np.arange(k + 1) * COUNT // k
        assert (np.histogram(places, edges)[0] == 1).all()
        corrected = [g + e for g, e in zip(data[steps - 1], errors, strict=True)]
        np.testing.assert_allclose(output[places], np.mean(corrected, axis=0)[places], rtol=1e-5, atol=1e-6)
        errors = [np.where(output != 0, 0, c) for c in corrected]
        for rank in range(WORLD):
            np.testing.assert_allclose(got.states[rank]["p0.error"].numpy(), errors[rank], atol=1e-5)


def test_randomk_without_a_residual_is_unbiased() -> None:
    x = np.random.default_rng(5).standard_normal(50).astype(np.float32)
    trials = 300
    outputs = [ours("randomk(0.3)", [[x]], first_step=t) for t in range(trials)]
    assert all(not got.states[0] for got in outputs)
    samples = np.stack([got.outputs[0][0].numpy() for got in outputs])
    assert ((samples != 0).sum(axis=1) == 15).all()
    # Intervals have three or four values: the variance of a value is at most three times its square.
    assert (np.abs(samples.mean(axis=0) - x) < 5 * np.sqrt(3 / trials) * np.abs(x)).all()


@pytest.mark.parametrize(
    ("spec", "paper"), [("powersgd(rank=3)", reference.powersgd), ("acpsgd(rank=3)", reference.acpsgd)]
)
def test_low_rank_codecs(spec: str, paper: Callable[..., Any]) -> None:
    data = grads((30, 24), steps=5)
    q = np.random.default_rng(9).standard_normal((24, 3)).astype(np.float32)
    mean, errors = paper(data, q)
    got = ours(spec, data, states=[{"p0.q": torch.from_numpy(q)} for _ in range(WORLD)])
    np.testing.assert_allclose(got.outputs[0][0].numpy(), mean, rtol=1e-3, atol=1e-3)
    for rank in range(WORLD):
        np.testing.assert_allclose(got.states[rank]["p0.error"].numpy(), errors[rank], rtol=1e-3, atol=1e-3)


RANDOM = {
    "terngrad": partial(reference.terngrad, clip=2.5),
    "qsgd(bits=4, block=32)": partial(reference.qsgd, levels=7, block=32),
    "natural": reference.natural,
}


@pytest.mark.parametrize("spec", RANDOM)
def test_random_codecs_choose_the_papers_neighbours_with_the_papers_odds(spec: str) -> None:
    x = np.random.default_rng(5).standard_normal(96).astype(np.float32)
    low, high, chance = RANDOM[spec](x)
    trials = 600
    samples = np.stack(
        [lockstep(spec, [[torch.from_numpy(x)]], first_step=t).outputs[0][0].numpy() for t in range(trials)]
    )
    up = np.isclose(samples, high, rtol=1e-4, atol=1e-6)
    assert (up | np.isclose(samples, low, rtol=1e-4, atol=1e-6)).all()
    sigma = np.sqrt(np.maximum(chance * (1 - chance), 1e-4) / trials)
    assert (np.abs(up.mean(axis=0) - chance) < 5 * sigma).all()


def test_ranks_draw_different_numbers() -> None:
    x = torch.from_numpy(grads()[0][0])
    for spec in RANDOM:
        both = lockstep(spec, [[x], [x]]).outputs[0][0]
        one = lockstep(spec, [[x]]).outputs[0][0]
        assert not torch.equal(both, one), spec
