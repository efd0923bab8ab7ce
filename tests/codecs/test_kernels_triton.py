"""The Triton kernels in Triton's interpreter on CPU tensors, against the plain reference; and compiled for a GPU.

Runs where Triton is installed and there is no CUDA device; with one, `operator_checks.py` tests the compiled kernels.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the compiled kernels are tested instead", allow_module_level=True)

from syncline.codecs.kernels import (
    gpu,
    gpu_blocks,
    gpu_keep,
    gpu_moments,
    gpu_random,
    gpu_sample,
    gpu_select,
    gpu_sign,
    gpu_ternary,
    linalg,
    pieces,
    plain,
    sparse,
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 8, 1000, 8192, 9001]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start out as rubbish, so that an element nobody wrote shows."""
    empty = torch.empty

    def poison(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(0xA5 if not out.dtype.is_floating_point else float("nan"))

    monkeypatch.setattr(torch, "empty", poison)


def values(n, dtype=torch.float32):
    return (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 2).to(dtype)


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", SIZES)
def test_sign(n, dtype):
    x = values(n, dtype)
    for l1 in (False, True):
        packed, means = gpu_sign.sign_encode(x, None, l1)
        want, want_means = pieces.sign_encode(x, None, l1)
        same(packed, want)
        torch.testing.assert_close(means, want_means, rtol=1e-5, atol=1e-6)
    packed, means = gpu_sign.sign_encode(x, None, False)
    same(gpu_sign.sign_decode(packed, means[0], means[1], n, None), plain.sign_decode(packed, *means[:, 0], n))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", SIZES)
def test_ternary(n, dtype):
    x = values(n, dtype)
    if n > 5:
        x[5] = float("nan")
    for seed, scale in ((None, torch.tensor(0.8)), (7, torch.tensor(5.0))):
        packed = gpu_ternary.ternary_encode(x, scale, seed, None)
        same(packed, pieces.ternary_encode(x, scale, seed, None))
        same(gpu_ternary.ternary_decode(packed, scale, n, None), plain.ternary_decode(packed, scale, n))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("n", SIZES)
def test_blocks(n, bits):
    x = values(n)
    if n > 600:
        x[600] = float("nan")
        x[700] = -float("inf")
    for seed in (None, 3):
        for l2 in (False, True):
            packed, scales = gpu_blocks.quantize_blocks(x, bits, 64, seed, l2)
            want, want_scales = plain.quantize_blocks(x, bits, 64, seed, l2)
            # The reference says inf for a block of inf, the kernel nan: both decode to nan.
            finite = want_scales.isfinite()
            same(scales.isfinite(), finite)
            torch.testing.assert_close(scales[finite], want_scales[finite], rtol=1e-6, atol=0)
            assert int((packed != want).sum()) <= (2 if l2 else 0)
            out = gpu_blocks.dequantize_blocks(packed, scales, bits, 64, n)
            same(out, plain.dequantize_blocks(packed, scales, bits, 64, n))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", SIZES)
def test_natural(n, dtype):
    x = values(n, dtype)
    codes = gpu_random.natural_encode(x, 9)
    same(codes, plain.natural_encode(x, 9))
    same(gpu_random.natural_decode(codes), plain.natural_decode(codes))


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack(bits):
    for n in SIZES:
        numbers = torch.arange(n).to(torch.uint8)
        packed = gpu.pack_bits(numbers, bits)
        same(packed, plain.pack_bits(numbers, bits))
        same(gpu.unpack_bits(packed, bits, n), numbers & ((1 << bits) - 1))


def test_many_tensors_in_one_launch():
    lengths = (3, 0, 9000, 1, 4097, 8)
    x = values(sum(lengths))
    packed, means = gpu_sign.sign_encode(x, lengths, False)
    want, want_means = pieces.sign_encode(x, lengths, False)
    same(packed, want)
    torch.testing.assert_close(means, want_means, rtol=1e-5, atol=1e-6)
    out = gpu_sign.sign_decode(packed, means[0], means[1], x.numel(), lengths)
    same(out, pieces.sign_decode(packed, means[0], means[1], x.numel(), lengths))
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    codes = gpu_ternary.ternary_encode(x, scale, 4, lengths)
    same(codes, pieces.ternary_encode(x, scale, 4, lengths))
    out = gpu_ternary.ternary_decode(codes, scale, x.numel(), lengths)
    same(out, pieces.ternary_decode(codes, scale, x.numel(), lengths))


RESIDUALS = [None, 0.5]


def residual(scale, n):
    return None if scale is None else values(n + 1)[:n] * scale


def agree(got, want):
    """Payloads and residuals; means may differ in the last bit."""
    for a, b in zip(got, want, strict=True):
        same(a, b) if a.dtype == torch.uint8 else torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("scale", RESIDUALS)
@pytest.mark.parametrize("n", [0, 1, 1000, 9001])
def test_encoders_with_a_residual(n, scale):
    x, error = values(n), residual(scale, n)
    for l1 in (False, True):
        agree(gpu_sign.sign_residual(x, error, None, l1), pieces.sign_residual(x, error, None, l1))
    if n > 600:
        x[600], x[700] = float("nan"), -float("inf")
    for seed in (None, 3):
        agree(
            gpu_ternary.ternary_residual(x, error, torch.tensor(0.8), seed, None),
            pieces.ternary_residual(x, error, torch.tensor(0.8), seed, None),
        )
    for bits in (8, 4):
        packed, scales, rest = gpu_blocks.quantize_residual(x, error, bits, 64, None, False)
        want, want_scales, want_rest = pieces.quantize_residual(x, error, bits, 64, None, False)
        same(packed, want)
        same(scales.isfinite(), want_scales.isfinite())
        same(rest, want_rest)
    packed, scales, rest = gpu.quantize_residual(x, error, 3, 50, None, False)  # no kernel for these
    same(packed, pieces.quantize_residual(x, error, 3, 50, None, False)[0])


def test_encoders_with_a_residual_and_many_tensors():
    lengths = (3, 0, 5000, 1, 4097, 8)
    x, error = values(sum(lengths)), residual(1.0, sum(lengths))
    for l1 in (False, True):
        agree(gpu_sign.sign_residual(x, error, lengths, l1), pieces.sign_residual(x, error, lengths, l1))
    scale = torch.arange(1.0, 7.0)
    for seed in (None, 4):
        agree(
            gpu_ternary.ternary_residual(x, error, scale, seed, lengths),
            pieces.ternary_residual(x, error, scale, seed, lengths),
        )


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, of inf - inf
@pytest.mark.parametrize("lengths", [None, (0,), (1,), (3, 0, 5000, 1, 4097, 8)])
def test_terngrad_with_its_scale(lengths, monkeypatch):
    monkeypatch.setattr(gpu_moments, "PROGRAMS", 3)
    monkeypatch.setattr(gpu_ternary, "PROGRAMS", 2)
    x = values(9000 if lengths is None else sum(lengths))
    for clip in (0.0, 2.5):
        packed, scale = gpu_ternary.terngrad(x, clip, 7, lengths)
        want, want_scale = pieces.terngrad(x, clip, 7, lengths)
        torch.testing.assert_close(scale, want_scale, rtol=1e-6, atol=0)
        assert int((packed != want).sum()) <= 2  # the scale's last bit may move a value across its limit
        if lengths is None:
            x[17] = float("inf")
            assert not gpu_ternary.terngrad(x, clip, 7, None)[1].isfinite().any()
            x[17] = 0


@pytest.mark.parametrize("n", [1, 1000, 9001])
def test_decoders_that_add(n):
    x, total = values(n), values(n + 2)[:n]
    packed, means = pieces.sign_encode(x, None, False)
    codes = pieces.ternary_encode(x, torch.tensor(0.8), None, None)
    steps, scales = plain.quantize_blocks(x, 8, 64, None, False)
    natural = plain.natural_encode(x, 5)
    for name, args in {
        "sign_onto": (packed, means[0], means[1], None),
        "ternary_onto": (codes, torch.tensor(0.8), None),
        "dequantize_onto": (steps, scales, 8, 64),
        "natural_onto": (natural,),
    }.items():
        for divisor in (1.0, 3.0):
            got, want = total.clone(), total.clone()
            getattr(gpu, name)(*args, got, divisor)
            getattr(pieces, name)(*args, want, divisor)
            same(got, want)


MATRICES = {
    "normal": lambda k, n, r: values(k * n * r).view(k, n, r),
    "repeated columns": lambda k, n, r: values(k * n).view(k, n, 1).expand(k, n, r).contiguous(),
    "zero": lambda k, n, r: torch.zeros(k, n, r),
    "one zero column": lambda k, n, r: values(k * n * r).view(k, n, r) * (torch.arange(r) != r // 2),
    "huge": lambda k, n, r: values(k * n * r).view(k, n, r) * 1e18,
    "tiny": lambda k, n, r: values(k * n * r).view(k, n, r) * 1e-30,
}


@pytest.mark.filterwarnings("ignore:.*encountered")  # NumPy's, of what is not finite
@pytest.mark.parametrize(
    ("k", "n", "r", "kind"),
    [
        # One matrix of each shape, and each kind in a tall and in a wide shape.
        pytest.param(
            *shape, kind, marks=[] if kind == "normal" or shape in ((2, 70, 4), (2, 5, 7)) else [pytest.mark.full]
        )
        for shape in [(1, 1, 1), (3, 50, 1), (2, 70, 4), (1, 700, 3), (2, 5, 7), (2, 40, 12)]
        for kind in MATRICES
    ],
)
def test_orthonormal(k, n, r, kind):
    m = MATRICES[kind](k, n, r)
    got, want = gpu.orthonormal(m).double(), linalg.orthonormal(m).double()
    norms = torch.linalg.vector_norm(got, dim=1)
    assert ((norms < 1e-6) | ((norms - 1).abs() < 1e-5)).all()
    same(norms > 0.5, torch.linalg.vector_norm(want, dim=1) > 0.5)
    # The same space; the columns themselves are unique where they are well defined.
    torch.testing.assert_close(got @ got.mT, want @ want.mT, rtol=0, atol=1e-4 if kind == "repeated columns" else 1e-5)
    m[0, 0, 0] = float("inf")
    assert gpu.orthonormal(m)[0].isnan().all()


def test_unit_columns():
    for k, n, r in ((1, 1, 1), (3, 50, 4), (2, 700, 5)):
        factor, fresh = values(k * n * r).view(k, n, r) * 1e10, values(k * n * r + 1)[1:].view(k, n, r)
        factor[0, :, 0] = 0
        torch.testing.assert_close(gpu.unit_columns(factor, fresh), linalg.unit_columns(factor, fresh))


@pytest.mark.parametrize("count", [0, 1, 700])
def test_scatter(count):
    indices = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:count].to(torch.int32)
    added = values(count)
    if count > 3:  # unused slots, and positions that do not exist
        indices[:2], added[:2] = 0, 0.0
        indices[2] = 1000
        indices[3] = -1
    got, want = values(1000), values(1000)
    gpu.scatter_unique(got, indices, added)
    kept = (indices >= 0) & (indices < 1000)
    want.index_add_(0, indices[kept].long(), added[kept])
    same(got, want)


@pytest.mark.parametrize("n", [0, 1, 5000])
def test_old_values_come_back_only_if_the_flag_says_so(n, monkeypatch):
    monkeypatch.setattr(gpu_keep, "_PROGRAMS", 2)
    new, old = values(n), values(n + 1)[:n]
    for good, before, want in ((True, old, new), (False, old, old), (False, None, torch.zeros(n))):
        got = new.clone()
        gpu.keep_if(torch.tensor(good), got, before)
        same(got, want)


KINDS = {
    "normal": lambda x: x,
    "ties": lambda x: x.round(),
    "equal": lambda x: x * 0 - 3,
    "zero": lambda x: x * 0,
    "wide": lambda x: torch.exp(x * 15),
    "broken": lambda x: torch.where(torch.arange(x.numel()) % 97 == 3, float("nan"), x),
    "infinite": lambda x: torch.where(torch.arange(x.numel()) % 53 == 7, -float("inf"), x),
    "tiny": lambda x: x * 1e-40,
    "one hot tile": lambda x: torch.where(torch.arange(x.numel()) // 600 == 1, x * 1e3, x),
}


def bits(x):
    return x.float().view(torch.int32)


def largest(x, k):
    """What top-k must give: by magnitude, nan above inf, and the first of equal ones."""
    keys = bits(x) & 0x7FFFFFFF
    return keys.sort(descending=True, stable=True).indices[:k].sort().values


def check_topk(x, k):
    found, indices = gpu_select.topk(x, k)
    assert indices.dtype == torch.int32
    assert found.dtype == x.dtype
    same(indices.long(), largest(x, k))
    same(bits(found), bits(x[indices.long()]))


def check_compact(x, threshold, capacity):
    limit = torch.tensor(threshold)
    for a, b in zip(gpu_select.compact(x, limit, capacity), sparse.compact(x, limit, capacity), strict=True):
        same(a, b)


@pytest.fixture
def used(monkeypatch):
    """For each selection, whether the buffer could serve it: the others read the whole tensor again."""
    served, honest = [], gpu_select._ordered

    def watched(x, threshold, found, tallies, need, out, tile):
        held = int(found.state[0])
        served.append(need <= held <= found.pairs.numel())
        return honest(x, threshold, found, tallies, need, out, tile)

    monkeypatch.setattr(gpu_select, "_ordered", watched)
    monkeypatch.setattr(gpu_select, "PROGRAMS", 3)
    return served


# Few values are all alike whatever their kind, and whole tiles differ from others in nothing but their border.
SELECTIONS = [(n, kind) for n in (1, 50) for kind in ("normal", "broken")]
SELECTIONS += [pytest.param(2048, kind, marks=pytest.mark.full) for kind in ("normal", "ties", "infinite")]
# The others pass through the same branches as these; compiled, all of them run on a GPU.
SELECTIONS += [
    pytest.param(5000, kind, marks=[] if kind in ("normal", "ties", "broken", "one hot tile") else [pytest.mark.full])
    for kind in KINDS
]


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize(("n", "kind"), SELECTIONS)
def test_selection(n, kind):
    x = KINDS[kind](values(n))
    limits, counts = [(0.0, n + 5), (1.0, n + 5)], {n // 100 + 1, n // 3}
    if kind == "normal" or n < 5000:
        limits += [(1.0, 0), (1.0, 1), (-1.0, 7), (float("nan"), n)]
        counts |= {0, 1, n}
    for threshold, capacity in limits:
        check_compact(x, threshold, capacity)
    for k in sorted(counts):
        check_topk(x, k)


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_selection_of_halves(dtype):
    for kind in ("ties", "infinite") if dtype == torch.float16 else ("normal", "broken"):
        x = KINDS[kind](values(3001)).to(dtype)
        check_topk(x, 100)
        check_compact(x, 2.5, 200)


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("config", [(512, 1), *(pytest.param((n, 4), marks=pytest.mark.full) for n in (1024, 2048))])
def test_selection_around_the_borders_of_tiles(config, monkeypatch):
    monkeypatch.setattr(gpu_select.topk, "__defaults__", (config,))
    monkeypatch.setattr(gpu_select.compact, "__defaults__", (config,))
    for n in (15, 16, 17, config[0] - 1, config[0], config[0] + 1, 2 * config[0] + 3):
        check_topk(values(n), max(1, n // 50))
        check_compact(values(n), 2.0, n // 10 + 1)


def test_the_buffer_serves_ordinary_data(used):
    for kind in ("normal", "wide", "tiny", "one hot tile"):
        check_topk(KINDS[kind](values(20_000)), 200)
    check_compact(values(20_000), 4.0, 1000)
    assert used == [True] * 5


@pytest.mark.parametrize(
    "wrong", [0.0, float("nan"), *(pytest.param(x, marks=pytest.mark.full) for x in (1e-30, 1e30, float("inf")))]
)
def test_topk_is_exact_even_when_the_sample_misleads(wrong, used, monkeypatch):
    monkeypatch.setattr(gpu_select, "_first_threshold", lambda x, k: torch.tensor(wrong))
    check_topk(values(9001), 500)
    check_topk(values(9001).round(), 500)
    assert used == [False, False]


def test_topk_of_data_that_hides_from_the_sample(used, monkeypatch):
    monkeypatch.setattr(gpu_select, "SAMPLES", 64)
    n, k = 9001, 300
    seen = sparse.stratified(n, 64, seed=k, device=torch.device("cpu"))
    low, high = values(n), values(n)
    low[seen] = 0
    high[seen] = 1e6
    check_topk(low, k)
    check_topk(high, k)
    assert used == [False, False]


def test_more_than_the_buffer_holds_is_compacted_in_order(used):
    check_compact(values(9001), 0.5, 100)
    check_compact(values(9001), 0.0, 9000)
    assert used == [False, True]


@pytest.mark.parametrize("n", [1, 100, 5000, 9001])
def test_sampled_threshold(n):
    for kind in ("normal", "ties", "zero", "broken"):
        x = KINDS[kind](values(n))
        for ratio, seed, samples in ((0.01, 1, 64), (0.3, -5, 1000), (1.0, 2**40, 8192)):
            got = gpu.sampled_threshold(x, ratio, seed, samples)
            same(got, sparse.sampled_threshold(x, ratio, seed, samples))
    assert float(gpu_sample.ranked(values(100), 100, samples=64, seed=1)) == 0


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, of inf - inf
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [0, 1, 1000, 2048, 9001])
def test_moments(n, dtype, monkeypatch):
    monkeypatch.setattr(gpu_moments, "PROGRAMS", 3)
    for scale, shift in ((1, 0), (1e-25, 0), (1e25, 0), (1e-3, 5)):
        x = ((values(n) * scale) + shift).to(dtype)
        if not x.isfinite().all():  # past float16
            continue
        exact = x.double()
        want = torch.stack([exact.mean(), exact.std(unbiased=False), exact.abs().max()]) if n else torch.zeros(3)
        got = gpu_moments.moments(x)
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=float(want[2]) * 1e-7)
        torch.testing.assert_close(plain.moments(x), got, rtol=1e-5, atol=float(want[2]) * 1e-6)
    if n:
        for bad in (float("nan"), float("inf")):
            x[n // 2] = bad
            _, deviation, top = gpu_moments.moments(x)
            assert deviation.isnan()
            assert not top.isfinite()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [0, 1, 2048, 5000])
def test_saturate(n, dtype):
    x = (torch.linspace(-1e5, 1e5, n)).to(dtype)
    x[n // 2 :: 7] = float("nan")
    x[n // 3 :: 5] = -float("inf")
    for target in (torch.float16, dtype):
        limit = 64480.5 if target != torch.bfloat16 else 64512.0  # the interpreter cuts off what bfloat16 rounds
        got = gpu.saturate(x, limit, target)
        assert got.dtype == target
        same(got, plain.saturate(x, limit, target))
    wide = torch.tensor([1e300, -2.0, float("inf")], dtype=torch.float64)
    assert gpu.saturate(wide, 10.0, torch.float64).tolist() == [10, -2, float("inf")]


@pytest.mark.full
def test_every_kernel_compiles_for_hopper():
    # In a process of its own: here the kernels are interpreted.
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=clean, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "16-byte loads" in done.stdout


def test_kernels_do_not_specialise_on_the_values_of_numbers():
    """`gpu_launch` finds a compiled kernel without looking at the values of its integers."""
    checked = 0
    for path in Path(gpu.__file__).parent.glob("gpu_*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "triton.jit":
                    free = set(ast.literal_eval(decorator.keywords[0].value))
                    numbers = [a.arg for a in function.args.args if a.annotation is None and a.arg[-4:] != "_ptr"]
                    assert set(numbers) <= free, f"{path.name}: {function.name}"
                    checked += 1
    assert checked > 20
