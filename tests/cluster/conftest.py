"""Fixtures for tests of emulated nodes: a check that nothing is left behind, and programs that a test can kill."""

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leftovers import MARK, held_namespaces, host_interfaces, marked_processes

from syncline.cluster.capabilities import capabilities


@pytest.fixture(scope="session")
def _possible() -> str:
    found = capabilities()
    return "" if found.can_namespaces and found.can_shape else found.why


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process of the test is gone after it, orphans too; no namespace is held, no interface is new."""
    if request.node.get_closest_marker("namespaces"):
        reason = request.getfixturevalue("_possible")
        if reason:
            pytest.skip(reason)
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = (held_namespaces(), host_interfaces())
    yield
    assert marked_processes(mark) == []
    assert (held_namespaces(), host_interfaces()) == before


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts a Python text as a program; its output comes through pipes."""

    def start(text: str, *arguments: str) -> "subprocess.Popen[str]":
        file = tmp_path / "program.py"
        file.write_text(text)
        return subprocess.Popen(
            [sys.executable, str(file), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
