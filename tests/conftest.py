"""Settings for all tests: threads, markers (`full`, `chaos`, `alone`, `gpu`), workers, and no skipped tests in CI."""

import gc
import os
import re
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the setting above, which it reads when it is imported

if not torch.cuda.is_available():
    # Before anything imports Triton: it decides then whether kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Background jobs and workers of xdist ignore it, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

NAMESPACES = (
    "tests/bench/test_bench_integrations.py",
    "tests/chaos/",
    "tests/cluster/",
    "tests/docs/test_commands.py",
    "tests/integrations/test_ray.py",
    "tests/cli/test_compare.py",
    "tests/cli/test_faults.py",
    "tests/cli/test_plan_cli.py",
    "tests/cli/test_usage.py",
    "tests/trace/test_clocks.py",
    "tests/train/test_trace_metadata.py",
)
"""Tests of these make network namespaces, or check that none is left: not beside each other."""
_skipped: list[str] = []


def pytest_addoption(parser):
    parser.addoption("--chaos", action="store_true", help="run the whole chaos set (marker 'chaos')")
    parser.addoption("--seed", type=int, default=0, help="of the random choices of chaos tests")
    parser.addoption("--soak", type=float, default=30, help="seconds of the soak among the chaos tests")
    parser.addoption("--record", help="a file for what was measured, as JSON: faults, documented commands")
    parser.addoption("--full", action="store_true", help="run the full tables too (marker 'full')")


def pytest_collection_modifyitems(config, items):
    """Leave `full` and `chaos` tests out unless asked for."""
    for marker in ("full", "chaos"):
        if not config.getoption(f"--{marker}"):
            left_out = [item for item in items if item.get_closest_marker(marker)]
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session):
    gc.freeze()  # collections of garbage need not look through torch and thousands of tests


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file stay together on a worker; so do all tests that make or look for namespaces."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.split("::")[0]
            if path.startswith(NAMESPACES):
                return "namespaces"
            # Loops of a subject share one start of ranks.
            part = re.search(r"test_loop\[(\d-\w+)-", nodeid)
            return f"{path}-{part[1]}" if part else path

    return ByFile(config, log)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_runtest_logreport(report):
    if report.skipped and "gpu" not in report.keywords and not hasattr(report, "wasxfail"):
        _skipped.append(f"{report.nodeid}: {report.longrepr}")


def pytest_collectreport(report):
    if report.skipped:
        _skipped.append(f"{report.nodeid}: {report.longrepr}")


def pytest_sessionfinish(session):
    """In CI a test that skips is a failure, except on a missing GPU."""
    if os.environ.get("CI") and _skipped and not hasattr(session.config, "workerinput"):
        print("\nskipped in CI, where only GPU tests may skip:", *_skipped, sep="\n  ")
        session.exitstatus = 1
