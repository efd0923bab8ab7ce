"""Fixtures of the chaos tests: a sandbox, random choices from the seed, undisturbed runs, the record of faults."""

import json
import platform
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sandbox import Sandbox, sandbox
from table import PAGE, RESULT, page_with
from trained import Job, check_clean, final_state

from syncline.cluster.capabilities import capabilities
from syncline.trace.record.cpu_time import available_cores

_rows: dict[str, list[dict[str, Any]]] = {}
"""Rows of the table, by test."""


@pytest.fixture(scope="session")
def _possible() -> str:
    found = capabilities()
    return "" if found.can_namespaces and found.can_shape else found.why


@pytest.fixture
def box(tmp_path: Path, _possible: str) -> Iterator[Sandbox]:
    """A sandbox for the test's commands."""
    if _possible:
        pytest.skip(_possible)
    with sandbox(tmp_path) as made:
        yield made


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this session."""
    return int(request.config.getoption("--seed"))


@pytest.fixture
def draw(request: pytest.FixtureRequest, seed: int) -> random.Random:
    """Random choices of this test; the seed and the test's name decide them."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], list[Any]]:
    """The final state of a job that nothing happened to; each job runs once."""
    known: dict[Job, list[Any]] = {}

    def final(job: Job) -> list[Any]:
        if job not in known:
            with sandbox(tmp_path_factory.mktemp("undisturbed")) as made:
                done = made.syncline(*job.arguments("run")).finish()
                assert done.code == 0, done.err
                check_clean(made, done)
                known[job] = final_state(made, "run")
        return known[job]

    return final


Record = Callable[..., None]


@pytest.fixture
def record(seed: int, request: pytest.FixtureRequest) -> Record:
    """Adds a row to the table of faults; `seconds`: from the fault to the named error, or to the command's end."""

    def add(fault: str, *, what: str, outcome: str, seconds: float | None, **more: Any) -> None:
        rounded = None if seconds is None else round(seconds, 2)
        _rows.setdefault(request.node.nodeid, []).append(
            {"fault": fault, "what": what, "seed": seed, "fired": True, "outcome": outcome, "seconds": rounded, **more}
        )

    return add


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that fails has a row, too. The table is written after each test, so that an interrupted run has one.

    Rows of tests that did not run now, or not yet, are kept: a long run can be made in pieces.
    """
    report = yield
    if report.when == "call" and report.failed:
        reason = str(report.longrepr).strip().splitlines()[-1]
        _rows.setdefault(item.nodeid, []).append(
            {"fault": item.name, "what": item.nodeid, "outcome": f"FAILED: {reason}"[:300], "fired": None}
        )
    if report.when == "teardown" and _rows and item.config.getoption("--record"):
        _write(Path(item.config.getoption("--record")), item.config)
    return report


def _write(target: Path, config: pytest.Config) -> None:
    seed = int(config.getoption("--seed"))
    before = json.loads(target.read_text()) if target.exists() else {"seed": seed, "faults": []}
    kept = [row for row in before["faults"] if before["seed"] == seed and row["test"] not in _rows]
    rows = [*kept, *({"test": test, **row} for test, found in _rows.items() for row in found)]
    content = {
        "format": "syncline chaos 1",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "cores": available_cores(),
        "platform": platform.platform(),
        "faults": sorted(rows, key=lambda row: row["test"]),
    }
    target.write_text(json.dumps(content, indent=1) + "\n")
    if target.resolve() == RESULT:
        PAGE.write_text(page_with(content))
