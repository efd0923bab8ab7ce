"""Links that change during a run: what may be asked, and a job that plans again because of it."""

import gzip
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from syncline.cluster.capabilities import capabilities
from syncline.engine.tuning.drift import WINDOW
from syncline.engine.tuning.tuner import PROFILED, WARM_UP
from syncline.errors import UsageError
from syncline.results.file import load, numbers
from syncline.train.config import Config, load_recipe, load_run, parse_settings
from syncline.train.session.link_changes import parse_changes
from syncline.train.session.local import run_local


class Silent:
    """A watcher that shows nothing."""

    def note(self, text: str) -> None: ...
    def begin(self, run: Any) -> None: ...
    def step(self, message: dict[str, Any]) -> None: ...
    def end(self, run: Any, result: dict[str, Any]) -> None: ...


def asked(*settings: str) -> Config:
    base = ["cluster.nodes=2", "cluster.bandwidth=200Mbit", "train.steps=20", "train.epochs=3", "train.device=cpu"]
    return Config().override(parse_settings([*base, *settings]))


def test_changes_come_from_a_recipe_and_from_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[cluster]\nnodes = 2\nchanges = {20 = "100Mbit", 5 = ""}\n[train]\ndevice = "cpu"')
    expected = [{"step": 5, "bandwidth": None}, {"step": 20, "bandwidth": 100_000_000}]
    assert parse_changes(load_recipe(str(recipe))) == expected
    config = asked("cluster.changes.20=100Mbit", "cluster.changes.5=")
    assert parse_changes(config) == expected
    (tmp_path / "config.json").write_text(json.dumps(config.as_dict()))
    assert load_run(tmp_path) == config
    assert parse_changes(asked()) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["cluster.changes.0=1Gbit"], "1 or more"),
        (["cluster.changes.soon=1Gbit"], "1 or more"),
        (["cluster.changes.-3=1Gbit"], "1 or more"),
        (["cluster.changes.20=fast"], "cluster.changes.20: 'fast' is not a bandwidth"),
        (["cluster.changes.20=1bit"], "cannot be shaped"),
        (["cluster.changes.60=1Gbit"], "use 1 to 59"),
        (["cluster.changes.20=1Gbit", "cluster.changes.020=2Gbit"], "twice"),
        (["cluster.changes.20=1Gbit", "cluster.nodes=0"], "add --nodes"),
        (["cluster.changes.21=1Gbit", "train.device=cuda"], "a multiple of --steps"),
        (["cluster.changes.20=1Gbit", "train.device=cuda", "train.steps=0"], "a multiple of --steps"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_fix(settings: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_changes(asked(*settings))


def test_a_table_is_expected() -> None:
    with pytest.raises(UsageError, match="takes a table"):
        asked("cluster.changes=20")


def test_a_session_refuses_before_it_leaves_anything(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use 1 to 59"):
        run_local(asked("cluster.changes.60=1Gbit"), out=tmp_path / "run", watcher=Silent())
    assert not (tmp_path / "run").exists()


CHANGED = WARM_UP + PROFILED + WINDOW + WINDOW // 2
"""In the middle of the second window."""


@pytest.mark.namespaces
@pytest.mark.timeout(100)
@pytest.mark.alone
def test_half_the_bandwidth_makes_all_ranks_plan_again_once_and_the_losses_stay(tmp_path: Path) -> None:
    able = capabilities()
    if not (able.can_namespaces and able.can_shape):
        pytest.skip(able.why)
    config = Config().override(
        {
            "train.model": "mlp(hidden=40)",
            "train.batch": 4,
            "train.steps": CHANGED + 5 * WINDOW + 7,
            "train.test_samples": 0,
            "train.device": "cpu",
            "cluster.nodes": 2,
            "cluster.bandwidth": "100Mbit",
            f"cluster.changes.{CHANGED}": "50Mbit",
            # DDP knows no plan: its losses are those of a run without any change.
            "compare.strategies": ["ddp", "syncline(tune=full)"],
        }
    )
    folder, _ = run_local(config, out=tmp_path / "run", watcher=Silent())
    results = load(folder)
    ddp, tuned = results["runs"]
    for run in (ddp, tuned):
        assert run["link_changes"] == [{"step": CHANGED, "bandwidth": 50_000_000}], "fired"
        times = numbers(run["step_ms_series"])
        before, after = median(times[CHANGED - 9 : CHANGED]), median(times[CHANGED + 1 :])
        assert after > 1.5 * before, "the links did change, and had their first rate again when the run began"
    assert ddp["planned_at"] == []
    first, second = tuned["planned_at"]
    assert first == WARM_UP + PROFILED
    # Two whole windows behind the one with the change in it; where the cores are busy, compute may be measured, too.
    assert CHANGED < second <= CHANGED + 2 * WINDOW + WINDOW // 2 + 1 + PROFILED
    assert [rank["planned_at"] for rank in tuned["ranks"]] == [[first, second]] * 2
    assert tuned["loss"] == ddp["loss"], "to the last bit"
    (trace,) = folder.glob("runs/syncline*/trace.json.gz")
    with gzip.open(trace, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["name"].startswith("replan ")]
    assert sorted((event["pid"], event["args"]["step"] + 1) for event in events) == [
        (rank, step) for rank in (0, 1) for step in (first, second)
    ]
    assert "50Mbit" in " ".join(results["warnings"])
    page = (folder / "report.html").read_text()
    assert "50Mbit" in page
    assert f"again after step {second}" in page
