"""The results file: round trip, atomic writes, and a clear sentence for every file that is not one."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import report_samples as samples
from syncline.errors import UsageError
from syncline.files import write_text
from syncline.results import file as results
from syncline.results.schema import validate


def test_round_trip_through_a_file_and_a_run_folder(tmp_path: Path) -> None:
    made = samples.results(samples.run("ddp"), samples.crashed())
    results.save(made, tmp_path / "run" / "results.json")
    assert results.load(tmp_path / "run" / "results.json") == made
    assert results.load(tmp_path / "run") == made
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["results.json"]


def test_a_loss_that_is_not_finite_is_saved_as_null(tmp_path: Path) -> None:
    made = samples.results(samples.run("ddp"))
    made["runs"][0]["loss"][3:5] = [math.nan, math.inf]
    results.save(made, tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert results.load(tmp_path)["runs"][0]["loss"][3:5] == [None, None]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.save(samples.results(), path)
    before = path.read_text()
    with pytest.raises(TypeError):
        results.save(samples.results(config={"x": object()}), path)
    with pytest.raises(UnicodeEncodeError):
        write_text("\ud800", path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not a results file"),
        ("{", "not a results file"),
        ("[1]", "not a Syncline results file"),
        ('{"a": 1}', "not a Syncline results file"),
        ("[" * 100_000, "not a results file"),
        ('{"schema": 99, "runs": []}', "newer Syncline"),
        ('{"schema": "1", "runs": []}', "schema is text"),
        ('{"schema": 1, "runs": 3}', "runs is a number, a list is expected"),
        ('{"schema": 1, "runs": [3]}', r"runs\[0\] is a number"),
    ],
)
def test_files_that_are_not_ours(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UsageError, match=says):
        results.load(tmp_path)


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        results.load(tmp_path)
    (tmp_path / "results.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a results file"):
        results.load(tmp_path)


BROKEN: list[tuple[list[Any], Any, str]] = [
    (["runs", 0, "strategy"], 3, r"runs\[0\].strategy is a number, text is expected"),
    (["runs", 0, "status"], "fine", "'ok' or 'crashed' is expected"),
    (["runs", 0, "world_size"], 0, "at least 1"),
    (["runs", 0, "world_size"], True, "world_size is a flag"),
    (["runs", 0, "step_ms"], {"median": 1}, "step_ms.mean is missing"),
    (["runs", 0, "loss"], [1, "x"], r"loss\[1\] is text"),
    (["runs", 0, "loss"], [10**400], "too large"),
    (["runs", 0, "breakdown"], {"wait": "long"}, "breakdown.wait is text"),
    (["runs", 0, "ranks"], [{}], r"ranks\[0\].rank is missing"),
    (["warnings"], [1], r"warnings\[0\] is a number"),
    (["network"], None, "network is null"),
    (["runs", 0], {"strategy": "x", "status": "crashed"}, "error is missing"),
    (["runs", 0], {"strategy": "x", "status": "crashed", "error": None}, "error is null, a table is expected"),
    (["runs", 0, "ranks"], [{"rank": -1}], r"ranks\[0\].rank is -1, at least 0 is expected"),
    (["runs", 0, "samples_per_s"], "many", "samples_per_s is text, a number or null is expected"),
    (["network", "emulated"], 1, "network.emulated is a number, true or false is expected"),
    (["runs", 0], {"strategy": "x", "status": "ok"}, "world_size is missing"),
]


@pytest.mark.parametrize(("path", "value", "says"), BROKEN)
def test_malformed_places_are_named(path: list[Any], value: Any, says: str) -> None:
    made: Any = copy.deepcopy(samples.results())
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UsageError, match=says):
        validate(made)


def test_a_config_nested_without_end_is_refused() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"a": deep}
    with pytest.raises(UsageError, match="nested"):
        validate(samples.results(config=deep))


RECORDED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


def test_files_of_earlier_versions_are_read() -> None:
    """Every committed file that has the shape of `results.json`."""
    shaped = [path for path in RECORDED if {"schema", "runs"} <= json.loads(path.read_text()).keys()]
    assert shaped
    for path in shaped:
        read = results.load(path)
        assert read["runs"]
        assert all(results.numbers(run["loss"]) for run in read["runs"] if results.ok(run))


def test_keys_of_a_later_version_are_kept() -> None:
    made: Any = samples.results()
    made["runs"][0]["plan"] = {"units": 3}
    assert validate(json.loads(json.dumps(made))) == made


def test_results_need_neither_jinja_nor_rich() -> None:
    code = (
        "import sys; sys.modules['jinja2'] = sys.modules['rich'] = sys.modules['markupsafe'] = None\n"
        "import syncline.results.file, syncline.stats, syncline.report.verdict, syncline.report.html"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
