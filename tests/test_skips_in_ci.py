"""In CI a test that skips is a failure, except on a missing GPU."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
HEAD = "import pytest\n"
PASSES = "def test_passes(): pass\n"
SKIPS = {
    "a call": PASSES + "def test_skips(): pytest.skip('no network')\n",
    "a mark": PASSES + "@pytest.mark.skipif(True, reason='no network')\ndef test_skips(): pass\n",
    "a fixture": PASSES + "@pytest.fixture\ndef network(): pytest.skip('no network')\ndef test_skips(network): pass\n",
    "a whole file": "pytest.skip('no network', allow_module_level=True)\n",
    "a missing package": "pytest.importorskip('no_network', reason='no network')\n",
}
GPU = PASSES + "@pytest.mark.gpu\ndef test_skips(): pytest.skip('no CUDA device')\n"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n  gpu: x\n  full: x\n  chaos: x\n")
    monkeypatch.setenv("CI", "true")
    return pytester


@pytest.mark.parametrize("how", SKIPS)
def test_a_skipped_test_fails_ci(suite: pytest.Pytester, how: str) -> None:
    suite.makepyfile(HEAD + SKIPS[how])
    done = suite.runpytest_inprocess("-p", "no:xdist")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["skipped in CI, where only GPU tests may skip:", "*no network*"])


def test_gpu_tests_may_skip(suite: pytest.Pytester) -> None:
    suite.makepyfile(HEAD + GPU)
    done = suite.runpytest_inprocess("-p", "no:xdist")
    done.assert_outcomes(passed=1, skipped=1)
    assert done.ret == pytest.ExitCode.OK


def test_elsewhere_tests_may_skip(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI")
    suite.makepyfile(HEAD + SKIPS["a call"])
    assert suite.runpytest_inprocess("-p", "no:xdist").ret == pytest.ExitCode.OK


def test_the_command_of_ci_says_that_it_is_ci() -> None:
    lines = (Path(__file__).parents[1] / ".ci" / "run").read_text().splitlines()
    assert lines.index("export CI=true") < lines.index("make test")
