"""Sessions in this process: the page of a real comparison in Chromium, and a machine without namespaces."""

import pytest

from chromium import CHROMIUM, OPTIONS
from syncline.cluster.capabilities import Capabilities
from syncline.train.config import Config
from syncline.train.session.local import run_local

sync_api = pytest.importorskip("playwright.sync_api")


class Silent:
    """A watcher that shows nothing."""

    def note(self, text): ...
    def begin(self, run): ...
    def step(self, message): ...
    def end(self, run, result): ...


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_of_a_real_comparison_draws_without_complaint(tmp_path):
    config = Config().override(
        {
            "train.model": "mlp(hidden=16)",
            "train.batch": 8,
            "train.steps": 6,
            "train.test_samples": 16,
            "cluster.nproc": 2,
            "compare.strategies": ["single", "gather-scatter", "all-reduce", "ddp"],
        }
    )
    folder, _ = run_local(config, out=tmp_path / "run", watcher=Silent())
    trouble = []
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=list(OPTIONS))
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.goto((folder / "report.html").as_uri())
        for chart in ("loss", "time", "shares", "wire"):
            assert page.locator(f"#chart-{chart} svg path, #chart-{chart} svg rect").count() > 3, chart
        text = page.inner_text("body")
        browser.close()
    assert trouble == []
    for name in ("single", "gather-scatter", "all-reduce", "ddp"):
        assert name in text


def test_where_nodes_cannot_be_emulated_local_ranks_run_and_it_is_said(tmp_path, monkeypatch):
    nothing = Capabilities(
        can_namespaces=False, how="none", can_shape=False, netem=False, why="no namespaces on this machine"
    )
    monkeypatch.setattr("syncline.train.session.placement.capabilities", lambda: nothing)
    config = Config().override(
        {
            "train.model": "mlp(hidden=16)",
            "train.batch": 4,
            "train.steps": 2,
            "train.test_samples": 0,
            "cluster.nodes": 2,
            "cluster.bandwidth": "1Gbit",
            "compare.strategies": ["all-reduce"],
        }
    )
    _, results = run_local(config, out=tmp_path / "run", watcher=Silent())
    assert results["runs"][0]["status"] == "ok"
    assert not results["network"]["emulated"]
    assert "plain local ranks" in results["warnings"][0]
    assert "no namespaces on this machine" in results["warnings"][0]
