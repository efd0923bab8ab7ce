"""Capabilities of the machine are tried in a child process, and nothing of the trial remains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import held_namespaces

from syncline.cluster import namespaces
from syncline.cluster.capabilities import Capabilities, capabilities


@pytest.mark.namespaces
def test_capabilities_of_this_machine() -> None:
    found = capabilities()
    assert found.can_namespaces
    assert found.can_shape
    assert found.how == ("root" if namespaces.is_privileged() else "userns")
    assert found.netem == (found.why == "")
    assert held_namespaces() == []


@pytest.mark.namespaces
def test_a_limit_of_no_namespaces_is_explained() -> None:
    script = (
        "from pathlib import Path\n"
        "from syncline.cluster import namespaces\n"
        "from syncline.cluster.capabilities import capabilities\n"
        "namespaces.become_namespace_root()\n"
        "Path('/proc/sys/user/max_net_namespaces').write_text('0')\n"
        "print(capabilities())\n"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "can_namespaces=False, how='none', can_shape=False, netem=False" in child.stdout
    assert "raise user.max_net_namespaces" in child.stdout


def test_without_pyroute2_the_reason_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyroute2.py").write_text("raise ImportError('injected')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = capabilities()
    assert "pip install pyroute2" in found.why
    assert not found.can_shape


def test_a_probe_that_dies_is_reported_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = capabilities()
    assert found == Capabilities(
        can_namespaces=False, how="none", can_shape=False, netem=False, why="nodes cannot be emulated: exit code 1"
    )
    assert os.access("/bin/false", os.X_OK)
