"""Selection, scatter, random numbers and orthonormal columns against independent computations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.codecs import ops
from syncline.codecs.kernels import native, rng


@pytest.fixture(params=["native", "torch"])
def either(request, monkeypatch):
    """The compiled functions, and what runs where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(f"no compiled functions: {native.status()}")


def values(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n).astype(np.float32))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("n", [1, 50, 5000, 70_001])
@pytest.mark.parametrize("ties", [False, True])
def test_topk_is_exact_and_in_order(n, ties):
    x = values(n).round() if ties else values(n)
    for k in sorted({0, 1, n // 100 + 1, n // 2, n}):
        found, indices = ops.topk(x, k)
        assert indices.dtype == torch.int32
        best = np.sort(np.abs(x.numpy()))[::-1][:k]
        assert np.array_equal(np.sort(np.abs(found.numpy()))[::-1], best)
        assert np.array_equal(x.numpy()[indices.numpy()], found.numpy())
        assert (np.diff(indices.numpy()) > 0).all()


def test_topk_of_other_dtypes_keeps_them():
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        found, indices = ops.topk(values(6000).to(dtype), 10)
        assert found.dtype == dtype
        assert torch.equal(values(6000).to(dtype)[indices.long()], found)


@pytest.mark.usefixtures("either")
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0, 1, 255, 256, 4096, 5003]), st.floats(0, 3), st.integers(0, 6000), st.integers(0, 3))
def test_compact_keeps_the_first_in_order(n, threshold, capacity, seed):
    x = values(n, seed)
    found, indices, count = ops.compact(x, threshold=threshold, capacity=capacity)
    where = np.flatnonzero(~(np.abs(x.numpy()) < np.float32(threshold)))[:capacity]
    assert int(count) == len(where)
    assert found.shape == indices.shape == (capacity,)
    assert np.array_equal(indices.numpy()[: len(where)], where)
    assert np.array_equal(found.numpy()[: len(where)], x.numpy()[where])
    assert not found[len(where) :].any()
    assert not indices[len(where) :].any()
    dense = ops.densify(found, indices, n) if n else torch.empty(0)
    want = np.zeros(n, dtype=np.float32)
    want[where] = x.numpy()[where]
    assert np.array_equal(dense.numpy(), want)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.2, 1.0])
def test_sampled_threshold_is_near_the_quantile(ratio):
    x = values(200_000)
    threshold = float(ops.sampled_threshold(x, ratio=ratio, seed=3, samples=20_000))
    reached = float((x.abs() >= threshold).float().mean())
    assert abs(reached - ratio) <= 5 * (ratio / 20_000) ** 0.5 + 1e-4
    assert threshold == float(ops.sampled_threshold(x, ratio=ratio, seed=3, samples=20_000))
    assert float(ops.sampled_threshold(x[:100], ratio=0.1, seed=1)) == float(x[:100].abs().sort().values[-10])
    assert float(ops.sampled_threshold(x[:0], ratio=0.1, seed=1)) == 0


def test_scatter_add_adds_repeats_and_refuses_what_lies_outside():
    out = ops.scatter_add(torch.ones(5), torch.tensor([1, 3, 1]), torch.tensor([1.0, 2.0, 3.0]))
    assert out.tolist() == [1, 5, 1, 3, 1]
    for bad in (5, -1, 2**31 - 1):
        with pytest.raises(ValueError, match="outside"):
            ops.scatter_add(torch.ones(5), torch.tensor([0, bad], dtype=torch.int32), torch.ones(2))
    with pytest.raises(ValueError, match="flat"):
        ops.scatter_add(torch.ones(5), torch.tensor([0]), torch.ones(2))
    with pytest.raises(ValueError, match="int32 or int64"):
        ops.scatter_add(torch.ones(5), torch.tensor([0.0]), torch.ones(1))
    with pytest.raises(ValueError, match="outside"):
        ops.densify(torch.ones(1), torch.tensor([0]), 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.topk(x, 11),
        lambda x: ops.topk(x, -1),
        lambda x: ops.compact(x, threshold=1.0, capacity=-1),
        lambda x: ops.sampled_threshold(x, ratio=0.0, seed=1),
        lambda x: ops.sampled_threshold(x, ratio=0.5, seed=1, samples=0),
        lambda x: ops.compact(x.long(), threshold=1.0, capacity=1),
        lambda x: ops.uniform(-1, seed=1),
        lambda x: ops.orthonormal(x),
        lambda x: ops.concat([]),
    ],
)
def test_bad_arguments_are_refused(call):
    with pytest.raises(ValueError, match=r"use|needed|needs|negative"):
        call(torch.ones(10))


def python_bits(seed, i):
    """The hash written from its definition, with Python's integers."""
    k0, k1 = (k & 0xFFFFFFFF for k in rng.keys(seed))
    k1 = (k1 + (i >> 32) * 0x9E3779B9) & 0xFFFFFFFF
    x = ((i & 0xFFFFFFFF) + k0) & 0xFFFFFFFF
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & 0xFFFFFFFF
    x = ((x ^ (x >> 11)) * 0xAC4C1B51 + k1) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x31848BAB) & 0xFFFFFFFF
    return x ^ (x >> 14)


@pytest.mark.parametrize("offset", [0, 12345, (1 << 31) - 3, (1 << 32) - 3, (5 << 32) + 7])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 - 1, 2**40])
def test_random_numbers_follow_the_definition(seed, offset):
    got = ops.random_bits(10, seed=seed, offset=offset)
    assert [v & 0xFFFFFFFF for v in got.tolist()] == [python_bits(seed, offset + i) for i in range(10)]
    unit = ops.uniform((2, 5), seed=seed, offset=offset)
    assert unit.view(-1).tolist() == [(python_bits(seed, offset + i) >> 8) * 2.0**-24 for i in range(10)]


def test_random_numbers_look_random():
    n = 1 << 20
    u = ops.uniform(n, seed=1).double()
    v = ops.uniform(n, seed=2).double()
    counts = torch.histc(u, 256, 0, 1)
    assert float(((counts - n / 256) ** 2 / (n / 256)).sum()) < 256 + 6 * 22.6  # chi-squared, 255 degrees
    for a, b in ((u, v), (u[1:], u[:-1]), (u[256:], u[:-256])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / n**0.5
    bits = ops.random_bits(n, seed=1)
    for place in range(32):
        assert abs(float(((bits >> place) & 1).double().mean()) - 0.5) < 5 * 0.5 / n**0.5
    assert torch.equal(ops.uniform(100, seed=1, offset=50), ops.uniform(150, seed=1)[50:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "r", "rank"), [(100, 8, 8), (100, 8, 3), (64, 64, 64), (5, 9, 5), (50, 4, 0), (1000, 1, 1), (3, 0, 0)]
)
def test_columns_are_orthonormal_and_span_the_same(n, r, rank, dtype):
    generator = torch.Generator().manual_seed(n + r)
    m = torch.randn(n, rank, generator=generator) @ torch.randn(rank, r, generator=generator)
    m = m.to(dtype)
    q = ops.orthonormal(m)
    assert q.dtype == dtype
    assert q.shape == m.shape
    q, m = q.double(), m.double()
    rough = 0.02 if dtype == torch.bfloat16 else 1e-5
    kept = torch.linalg.vector_norm(q, dim=0) > 0.5
    assert torch.allclose(q.mT @ q, torch.diag(kept.double()), atol=rough)
    assert torch.allclose(q @ (q.mT @ m), m, atol=rough * float(m.abs().max() if m.numel() else 0) * 5 + 1e-12)
    if rank and dtype != torch.bfloat16:
        assert int(kept.sum()) >= rank


def test_orthonormal_of_special_matrices():
    column = torch.randn(20, 1)
    doubled = ops.orthonormal(torch.cat([column, column, column * 2], dim=1))
    assert torch.linalg.vector_norm(doubled, dim=0).round().tolist() == [1, 0, 0]
    for scale in (1e-30, 1e30):
        q = ops.orthonormal(torch.randn(40, 5) * scale)
        assert torch.allclose(q.mT @ q, torch.eye(5), atol=1e-5)
    spread = torch.randn(200, 6) * torch.logspace(0, -6, 6)
    q = ops.orthonormal(spread)
    assert torch.allclose(q.mT @ q, torch.eye(6), atol=1e-4)
    batch = torch.randn(3, 4, 30, 5)
    assert torch.allclose(ops.orthonormal(batch)[1, 2], ops.orthonormal(batch[1, 2]), atol=1e-6)
    assert torch.equal(ops.orthonormal(batch), ops.orthonormal(batch))
    broken = torch.randn(10, 3)
    broken[2, 1] = float("nan")
    assert not ops.orthonormal(broken).isfinite().all()
