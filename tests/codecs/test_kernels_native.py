"""The compiled CPU functions: they build, stay away when told to, and say why."""

import os
import subprocess
import sys

import pytest
import torch

from syncline.codecs.kernels import cpu, native

CODE = """
import torch
from syncline.codecs import ops
from syncline.codecs.kernels import native
packed, _, _ = ops.sign_encode(torch.arange(10000.) - 5000)
assert int(packed.sum()) == 625 * 255
print(native.library() is not None, native.status())
"""


def run(**environment):
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_switched_off():
    assert run(SYNCLINE_NATIVE="0") == "False switched off by SYNCLINE_NATIVE=0\n"


@pytest.mark.full
def test_without_a_compiler(tmp_path):
    assert "no C compiler found" in run(PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))


@pytest.mark.full
def test_a_compiler_that_fails_is_quoted(tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho it hurts >&2\nexit 1\n")
    broken.chmod(0o755)
    out = run(CC=str(broken), XDG_CACHE_HOME=str(tmp_path))
    assert out.startswith("False")
    assert "it hurts" in out


def test_builds_once_into_the_cache(tmp_path):
    if native.library() is None:
        pytest.skip(f"no compiled functions: {native.status()}")
    first = run(XDG_CACHE_HOME=str(tmp_path))
    made = sorted((tmp_path / "syncline").iterdir())
    assert len(made) == 1
    assert first == f"True {made[0]}\n"
    when = made[0].stat().st_mtime_ns
    assert run(XDG_CACHE_HOME=str(tmp_path)) == first
    assert made[0].stat().st_mtime_ns == when


@pytest.mark.full
def test_a_cache_that_others_may_write_to_is_not_used(tmp_path):
    if native.library() is None:
        pytest.skip(f"no compiled functions: {native.status()}")
    folder = tmp_path / "syncline"
    folder.mkdir()
    folder.chmod(0o777)
    assert "others may write" in run(XDG_CACHE_HOME=str(tmp_path))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [64, 250])
@pytest.mark.parametrize(("seed", "l2"), [(None, False), (7, False), (7, True)])
def test_quantisation_with_a_residual_and_onto_a_total_equals_the_separate_passes(bits, block, seed, l2):
    if native.library() is None:
        pytest.skip(f"no compiled functions: {native.status()}")
    generator = torch.Generator().manual_seed(bits + block)
    for n in (4096, 5003):
        x, error, total = (torch.randn(n, generator=generator) for _ in range(3))
        x[100], error[1001] = torch.inf, torch.nan
        for residual in (None, error):
            whole = x if residual is None else x + residual
            packed, scales, rest = cpu.quantize_residual(x, residual, bits, block, seed, l2)
            want, want_scales = cpu.quantize_blocks(whole, bits, block, seed, l2)
            decoded = cpu.dequantize_blocks(packed, scales, bits, block, n)
            assert torch.equal(packed, want)
            torch.testing.assert_close(scales, want_scales, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(rest, whole - decoded, rtol=0, atol=0, equal_nan=True)
            assert rest.isnan().any()
            assert rest.isfinite().any()
            for divisor in (1, 3, 4):
                onto = total.clone()
                cpu.dequantize_onto(packed, scales, bits, block, onto, float(divisor))
                torch.testing.assert_close(onto, (total + decoded) / divisor, rtol=0, atol=0, equal_nan=True)
        columns = torch.zeros(n, 2)
        cpu.dequantize_onto(packed, scales, bits, block, columns[:, 0], 1.0)
        torch.testing.assert_close(columns[:, 0], decoded, rtol=0, atol=0, equal_nan=True)
        assert not columns[:, 1].any(), "memory in between stays as it is"
