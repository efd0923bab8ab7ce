"""The compiled CPU functions: they build, stay away when told to, and say why."""

import os
import subprocess
import sys

import pytest

from syncline.codecs.kernels import native

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
