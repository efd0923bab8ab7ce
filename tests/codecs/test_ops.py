"""Dense operators against independent NumPy computations, over sizes, dtypes, layouts and special values."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.codecs import ops
from syncline.codecs.kernels import cpu_torch, native, pieces, plain

SIZES = [0, 1, 7, 8, 255, 256, 1000, 4096, 5003, 70_001]


def values(n, scale=1.0):
    return torch.from_numpy(np.random.default_rng(n).standard_normal(n).astype(np.float32) * np.float32(scale))


@pytest.fixture(params=["native", "torch"])
def either(request, monkeypatch):
    """The compiled functions, and what runs where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(f"no compiled functions: {native.status()}")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=200))
def test_pack_is_little_endian_and_comes_back(bits, numbers):
    clean = [v & ((1 << bits) - 1) for v in numbers]
    packed = ops.pack_bits(torch.tensor(numbers, dtype=torch.uint8), bits)
    whole = sum(v << (bits * i) for i, v in enumerate(clean))
    assert bytes(packed.tolist()) == whole.to_bytes((len(numbers) * bits + 7) // 8, "little")
    assert ops.unpack_bits(packed, bits, len(numbers)).tolist() == clean


def numpy_blocks(x, bits, block):
    top = (1 << (bits - 1)) - 1
    padded = np.pad(x, (0, -len(x) % block)).reshape(-1, block)
    size = np.abs(padded).max(axis=1, initial=0)
    factor = np.divide(np.float32(top), size, out=np.zeros_like(size), where=size > 0)
    steps = np.rint(padded * factor[:, None])
    return steps.reshape(-1)[: len(x)].astype(int), size / np.float32(top)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("n", SIZES)
def test_blocks_equal_numpy(n, bits):
    x = values(n)
    packed, scales = ops.quantize_blocks(x, bits=bits, block=64)
    steps, want = numpy_blocks(x.numpy(), bits, 64)
    assert packed.numel() == ops.packed_size(n, bits)
    np.testing.assert_allclose(scales.numpy(), want, rtol=1e-6)
    codes = ops.unpack_bits(packed, bits, n).numpy().astype(int)
    half = 1 << (bits - 1)
    assert np.array_equal((codes ^ half) - half, steps)
    out = ops.dequantize_blocks(packed, scales, bits=bits, block=64, count=n)
    np.testing.assert_allclose(out.numpy(), steps * np.repeat(want, 64)[:n], rtol=1e-6)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_rounding_by_chance_has_no_bias_and_stays_within_a_step(norm):
    x = values(8192)
    total, rounds = torch.zeros(8192), 200
    for seed in range(rounds):
        packed, scales = ops.quantize_blocks(x, bits=4, seed=seed, norm=norm)
        out = ops.dequantize_blocks(packed, scales, bits=4, count=8192)
        step = scales.repeat_interleave(256)
        assert bool(((out - x).abs() <= step * 1.001).all())
        total += out
    # Each rounding has a variance of at most step**2 / 4; five deviations of the mean over 8192 values.
    assert float(((total / rounds - x) / step).abs().max()) < 5 * 0.5 / rounds**0.5


@pytest.mark.usefixtures("either")
def test_a_seed_gives_the_same_codes_on_every_path():
    x = values(70_001)
    for norm in ("max", "l2"):
        packed, scales = ops.quantize_blocks(x, bits=8, seed=5, norm=norm)
        want, want_scales = plain.quantize_blocks(x, 8, 256, 5, norm == "l2")
        torch.testing.assert_close(scales, want_scales, rtol=1e-6, atol=0)
        assert int((packed != want).sum()) <= (0 if norm == "max" else 5)
    assert torch.equal(ops.terngrad_encode(x, scale=4.0, seed=5), plain.terngrad_encode(x, torch.tensor(4.0), 5))
    assert torch.equal(ops.natural_encode(x, seed=5), plain.natural_encode(x, 5))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", SIZES)
def test_signs_equal_numpy(n, dtype):
    x = values(n).to(dtype)
    exact = x.double().numpy()
    packed, pos, neg = ops.sign_encode(x)
    assert np.array_equal(packed.numpy(), np.packbits(exact >= 0, bitorder="little"))
    means = [side.mean() if side.size else 0.0 for side in (exact[exact >= 0], exact[exact < 0])]
    np.testing.assert_allclose([float(pos), float(neg)], means, rtol=1e-5)
    out = ops.sign_decode(packed, pos, neg, n)
    assert np.array_equal(out.numpy(), np.where(exact >= 0, float(pos), float(neg)).astype(np.float32))
    bits, scale = ops.sign_encode_l1(x)
    assert torch.equal(bits, packed)
    np.testing.assert_allclose(float(scale), np.abs(exact).mean() if n else 0.0, rtol=1e-5)


@pytest.mark.usefixtures("either")
def test_minus_zero_is_not_negative():
    packed, _, neg = ops.sign_encode(torch.full((5000,), -0.0))
    assert float(neg) == 0
    assert bool((packed == 255).all())


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("n", SIZES)
def test_ternary_equals_numpy(n):
    x = values(n)
    packed = ops.ternary_encode(x, threshold=0.7)
    out = ops.ternary_decode(packed, 0.7, n)
    limit = np.float32(0.7)
    want = np.where(x.numpy() > limit, limit, np.where(x.numpy() < -limit, -limit, 0))
    assert packed.numel() == (n + 3) // 4
    assert np.array_equal(out.numpy(), want.astype(np.float32))


@pytest.mark.usefixtures("either")
def test_terngrad_has_no_bias():
    x = values(4096)
    scale = ops.abs_max(x)
    assert float(scale) == np.abs(x.numpy()).max()
    rounds = 300
    total = sum(ops.ternary_decode(ops.terngrad_encode(x, scale=scale, seed=s), scale, 4096) for s in range(rounds))
    assert float((total / rounds - x).abs().max()) < 5 * float(scale) * 0.5 / rounds**0.5


@pytest.mark.parametrize("n", SIZES)
def test_moments_equal_numpy(n):
    x = values(n) + 1
    exact = x.numpy().astype(np.float64)
    want = (exact.mean(), exact.std(), np.abs(exact).max()) if n else (0, 0, 0)
    np.testing.assert_allclose([float(m) for m in ops.moments(x)], want, rtol=1e-5)
    np.testing.assert_allclose(float(ops.moments(x * 1e-25)[1]), want[1] * 1e-25, rtol=1e-5)


def test_saturate_keeps_what_is_not_finite():
    x = torch.tensor([[1e30, -1e30], [float("inf"), -float("inf")], [float("nan"), 3.5]])
    for dtype in (torch.float16, torch.float32):
        out = ops.saturate(x, limit=1024.0, dtype=dtype)
        assert out.dtype == dtype
        want = torch.tensor([[1024, -1024], [float("inf"), -float("inf")], [float("nan"), 3.5]], dtype=dtype)
        torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
    assert ops.saturate(torch.tensor([1e300], dtype=torch.float64), limit=2.0, dtype=torch.float64).tolist() == [2]


@pytest.mark.usefixtures("either")
def test_natural_is_a_neighbouring_power_of_two_without_bias():
    x = values(5003)
    rounds, total = 200, torch.zeros(5003)
    low = np.exp2(np.floor(np.log2(np.abs(x.numpy()))))
    for seed in range(rounds):
        out = ops.natural_decode(ops.natural_encode(x, seed=seed), 5003)
        ratio = np.abs(out.numpy()) / low
        assert np.isin(ratio, (1, 2)).all()
        assert np.array_equal(np.sign(out.numpy()), np.sign(x.numpy()))
        total += out
    assert float(((total / rounds - x) / torch.from_numpy(low)).abs().max()) < 5 * 0.5 / rounds**0.5
    edge = torch.tensor([0.0, 1e-30, 1e30, -1e30] * 2000)
    out = ops.natural_decode(ops.natural_encode(edge, seed=1), 8000)
    assert out[:4].tolist() == [0, 0, 2.0**50, -(2.0**50)]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("n", [300, 9000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_lost(n, bad):
    x = values(n)
    x[100] = bad
    for norm in ("max", "l2"):
        packed, scales = ops.quantize_blocks(x, block=64, norm=norm)
        broken = ops.dequantize_blocks(packed, scales, block=64, count=n).isnan()
        assert broken[64:128].all()
        assert int(broken.sum()) == 64
    assert not all(map(np.isfinite, map(float, ops.sign_encode(x)[1:])))
    assert not np.isfinite(float(ops.sign_encode_l1(x)[1]))
    assert ops.natural_decode(ops.natural_encode(x, seed=1), n)[100].isnan()
    scale = ops.abs_max(x)
    out = ops.ternary_decode(ops.terngrad_encode(x, scale=scale, seed=1), scale, n)
    assert not out.isfinite().all()
    assert not np.isfinite(float(scale))
    values_, indices, _ = ops.compact(x, threshold=100.0, capacity=4)
    assert not values_[0].isfinite()
    assert int(indices[0]) == 100
    assert 100 in ops.topk(x, 3)[1].tolist()


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30, 1e38])
def test_tiny_and_huge(scale):
    x = values(5000, 1).clamp(-3, 3) * scale
    for norm in ("max", "l2"):
        out = ops.dequantize_blocks(*ops.quantize_blocks(x, norm=norm), count=5000)
        assert out.isfinite().all()
        limit = float(x.abs().max()) * (1 if norm == "max" else 10)
        assert float((out - x).abs().max()) <= max(limit / 100, 1e-34)


def test_views_and_shapes_are_read_as_their_flat_copy():
    x = values(10_000).view(100, 100)
    for view in (x.t(), x[::2, ::3], x[:, 5:17], x.view(10, 10, 100).permute(2, 0, 1)):
        flat = view.contiguous().view(-1)
        assert torch.equal(ops.sign_encode(view)[0], ops.sign_encode(flat)[0])
        assert torch.equal(ops.quantize_blocks(view)[0], ops.quantize_blocks(flat)[0])
        assert torch.equal(ops.topk(view, 10)[1], ops.topk(flat, 10)[1])
        assert torch.equal(ops.natural_encode(view, seed=1), ops.natural_encode(flat, seed=1))


@pytest.mark.usefixtures("either")
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 8, 100, 1030, 5000]), max_size=6))
def test_many_tensors_give_what_each_gives(lengths):
    parts = [values(n + i)[i:] for i, n in enumerate(lengths)]
    flat = ops.concat(parts) if parts else torch.empty(0)
    packed, pos, neg = ops.sign_encode(flat, lengths=lengths)
    each = [ops.sign_encode(p) for p in parts]
    assert packed.tolist() == [b for e in each for b in e[0].tolist()]
    np.testing.assert_allclose(pos.numpy(), [float(e[1]) for e in each], rtol=1e-5)
    np.testing.assert_allclose(neg.numpy(), [float(e[2]) for e in each], rtol=1e-5)
    out = ops.sign_decode(packed, pos, neg, flat.numel(), lengths=lengths)
    want = [ops.sign_decode(e[0], p, q, n) for e, p, q, n in zip(each, pos, neg, lengths, strict=True)]
    assert out.tolist() == [v for w in want for v in w.tolist()]
    scale = ops.abs_max(flat, lengths=lengths)
    codes = ops.terngrad_encode(flat, scale=scale, seed=3, lengths=lengths)
    assert torch.equal(codes, pieces.ternary_encode(flat, scale, 3, tuple(lengths)))
    out = ops.ternary_decode(codes, scale, flat.numel(), lengths=lengths)
    assert torch.equal(out, pieces.ternary_decode(codes, scale, flat.numel(), tuple(lengths)))


def test_vectorised_torch_equals_the_reference():
    for n in (0, 100, 1024, 5003, cpu_torch.CHUNK * 2 + 77):
        x = values(n)
        packed, means = cpu_torch.sign_encode(x, False)
        want, pos, neg = plain.sign_encode(x)
        assert torch.equal(packed, want)
        torch.testing.assert_close(means, torch.stack([pos, neg]), rtol=1e-5, atol=1e-6)
        for bits in (4, 8):
            for seed in (None, 3):
                for got, ref in zip(
                    cpu_torch.quantize_blocks(x, bits, 256, seed, False),
                    plain.quantize_blocks(x, bits, 256, seed, False),
                    strict=True,
                ):
                    assert torch.equal(got, ref)


def test_concat_and_extract_undo_each_other():
    parts = [torch.randn(2, 3), torch.randn(0), torch.randn(()), torch.randn(4, 1, 2)]
    back = ops.extract(ops.concat(parts), [p.shape for p in parts])
    assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))
    with pytest.raises(ValueError, match="must fit"):
        ops.extract(torch.zeros(5), [(2, 2)])


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.unpack_bits(torch.zeros(3, dtype=torch.uint8), 1, 100),
        lambda: ops.unpack_bits(torch.zeros(3, dtype=torch.uint8), 9, 1),
        lambda: ops.unpack_bits(torch.zeros(3, dtype=torch.uint8), 1, -1),
        lambda: ops.unpack_bits(torch.zeros(3), 1, 24),
        lambda: ops.dequantize_blocks(torch.zeros(9, dtype=torch.uint8), torch.ones(1), count=10),
        lambda: ops.dequantize_blocks(torch.zeros(10, dtype=torch.uint8), torch.ones(2), count=10),
        lambda: ops.dequantize_blocks(torch.zeros(10, dtype=torch.uint8), torch.ones(1).int(), count=10),
        lambda: ops.quantize_blocks(torch.zeros(4), bits=1),
        lambda: ops.quantize_blocks(torch.zeros(4), block=0),
        lambda: ops.quantize_blocks(torch.zeros(4), norm="l3"),
        lambda: ops.sign_decode(torch.zeros(2, dtype=torch.uint8), torch.ones(()), torch.ones(()), 17),
        lambda: ops.sign_decode(torch.zeros(2, dtype=torch.uint8), torch.ones(3), torch.ones(()), 16),
        lambda: ops.sign_encode(torch.zeros(4), lengths=[1, 2]),
        lambda: ops.sign_encode(torch.zeros(4, dtype=torch.int32)),
        lambda: ops.ternary_decode(torch.zeros(2, dtype=torch.uint8), 1.0, 9),
        lambda: ops.ternary_decode(torch.zeros(2, dtype=torch.uint8), torch.ones(1), 8, lengths=[4, 5]),
        lambda: ops.natural_decode(torch.zeros(2, dtype=torch.uint8), 3),
    ],
)
def test_payloads_that_cannot_be_right_are_refused(call):
    with pytest.raises(ValueError, match=r"needed|use|must agree|negative"):
        call()


def test_fakes_tell_the_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def shapes(x):
        packed, pos, neg = ops.sign_encode(x)
        out = ops.sign_decode(packed, pos, neg, 1001)
        blocks, scales = ops.quantize_blocks(x, bits=4)
        top = ops.topk(x, 10)
        kept = ops.compact(x, threshold=1.0, capacity=20)
        codes = ops.natural_encode(x, seed=1)
        return [t.shape for t in (packed, pos, out, blocks, scales, *top, *kept, codes)]

    with FakeTensorMode():
        fake = shapes(torch.empty(1001))
    assert fake == shapes(torch.randn(1001)) == shapes(torch.empty(1001, device="meta"))


@pytest.mark.parametrize(("n", "k", "r"), [(5, 7, 2), (256, 192, 4), (1, 9, 1)])
def test_thin_products(n, k, r):
    m, factor, other = values(2 * n * k).view(2, n, k), values(2 * k * r).view(2, k, r), values(2 * n * r).view(2, n, r)
    plain, thin, tall = m.numpy(), factor.numpy(), other.numpy()
    np.testing.assert_allclose(ops.thin_product(m, factor).numpy(), plain @ thin, rtol=1e-4, atol=1e-4)
    back = ops.thin_product(m.mT, other)
    assert back.is_contiguous()
    np.testing.assert_allclose(back.numpy(), plain.transpose(0, 2, 1) @ tall, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [7, 1 << 13])
def test_decoders_refuse_a_total_of_another_size_and_add_to_any_dtype(count):
    values = torch.linspace(-1, 1, count)
    packed, scales = ops.quantize_blocks(values, bits=4, block=64)
    decoded = ops.dequantize_blocks(packed, scales, bits=4, block=64, count=count)
    for shape in ((2 * count,), (count // 2,), (1, count)):
        with pytest.raises(ValueError, match=rf"give a tensor of shape \({count},\)"):
            ops.dequantize_blocks(packed, scales, bits=4, block=64, count=count, onto=torch.zeros(shape))
    for total in (torch.ones(count, dtype=torch.float64), torch.ones(2 * count)[::2]):
        ops.dequantize_blocks(packed, scales, bits=4, block=64, count=count, onto=total, divisor=2)
        assert torch.allclose(total.float(), (1 + decoded) / 2)
    half = ops.dequantize_blocks(packed, scales.half(), bits=4, block=64, count=count)
    assert torch.equal(half, ops.dequantize_blocks(packed, scales.half().float(), bits=4, block=64, count=count))
