"""The Triton kernels in Triton's interpreter on CPU tensors, against the plain reference; and compiled for a GPU.

Runs where Triton is installed and no CUDA device is there: with one, `bench.checks` tests the compiled kernels.
"""

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

os.environ["TRITON_INTERPRET"] = "1"

from syncline.codecs.kernels import (
    gpu,
    gpu_blocks,
    gpu_random,
    gpu_select,
    gpu_sign,
    gpu_ternary,
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


KINDS = {
    "normal": lambda x: x,
    "ties": lambda x: x.round(),
    "zero": lambda x: x * 0,
    "wide": lambda x: torch.exp(x * 15),
    "broken": lambda x: torch.where(torch.arange(x.numel()) % 97 == 3, float("nan"), x),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 50, 5000])
def test_selection(n, kind, monkeypatch):
    monkeypatch.setattr(gpu_select, "PROGRAMS", 3)
    x = KINDS[kind](values(n))
    for threshold in (0.0, 1.0, -1.0, float("nan")):
        for capacity in (0, 1, n + 5):
            got = gpu_select.compact(x, torch.tensor(threshold), capacity)
            for a, b in zip(got, sparse.compact(x, torch.tensor(threshold), capacity), strict=True):
                same(a, b)
    for k in sorted({0, 1, n // 100 + 1, n}):
        found, indices = gpu_select.topk(x, k)
        keys = (x.view(torch.int32) & 0x7FFFFFFF).sort(descending=True).values[:k]
        same((found.view(torch.int32) & 0x7FFFFFFF).sort(descending=True).values, keys)
        same(x[indices.long()], found)
        assert bool((indices[1:] > indices[:-1]).all())


def test_topk_is_exact_even_when_the_sample_misleads(monkeypatch):
    monkeypatch.setattr(gpu_select, "PROGRAMS", 3)
    x = values(9001)
    for wrong in (0, 0x7F000000):
        monkeypatch.setattr(gpu_select, "_first_limits", lambda x, k, w=wrong: torch.full((16,), w, dtype=torch.int32))
        found, _ = gpu_select.topk(x, 500)
        same(found.abs().sort().values, x.abs().sort().values[-500:])


def test_every_kernel_compiles_for_hopper():
    # In a process of its own: here the kernels are interpreted.
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=clean, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "16-byte loads" in done.stdout
