"""Settings for all tests: threads, the markers `full`, `alone` and `gpu`, workers, and no skipped tests in CI."""

import os
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

_skipped: list[str] = []


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the full tables too (marker 'full')")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave `full` tests out unless asked for, and tell xdist which tests stay together on one worker."""
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        # Tests that look for namespaces and interfaces left behind must not run beside others that make them.
        namespaces = item.get_closest_marker("namespaces") or item.path.parent.name == "cluster"
        group = "namespaces" if namespaces else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


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
