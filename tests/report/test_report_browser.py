"""The page in headless Chromium: it draws, shows values, toggles, and nothing is blocked."""

from pathlib import Path
from typing import Any

import pytest

import report_samples as samples
from syncline.report.html import write_html
from syncline.results.schema import Results

pytestmark = pytest.mark.browser


@pytest.fixture
def visit(visit_file: Any, tmp_path: Path) -> Any:
    """Opens results as a page."""

    def run(results: Results, **how: Any) -> Any:
        path = tmp_path / "report.html"
        write_html(results, path)
        return visit_file(path, **how)

    return run


def classic() -> Results:
    return samples.results(*[samples.run(name) for name in list(samples.STRATEGIES)[:-1]], samples.crashed(steps=17))


def test_every_chart_is_drawn(visit: Any) -> None:
    page = visit(classic())
    for chart, marks in (("loss", ".line path"), ("time", ".line path"), ("shares", ".piece"), ("wire", ".piece")):
        figure = page.locator(f"#chart-{chart}")
        assert figure.locator(marks).count() >= 7, chart
        size = figure.locator("svg").first.bounding_box()
        assert size["width"] > 900, chart
        assert size["height"] > 200, chart
    assert page.locator("#chart-time .diamond").count() == 8
    paths = page.eval_on_selector_all("#chart-loss .line path", "nodes => nodes.map(n => n.getAttribute('d').length)")
    assert min(paths) > 100


def test_the_legend_hides_a_strategy_in_all_charts(visit: Any) -> None:
    page = visit(classic())
    count = lambda chart: page.locator(f"#chart-{chart} .line").count()  # noqa: E731
    assert (count("loss"), count("time")) == (8, 8)
    chip = page.locator("#chart-loss .chip", has_text="gather-scatter")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert (count("loss"), count("time")) == (7, 7)
    chip.click()
    assert count("loss") == 8
    chip.click(modifiers=["Shift"])
    assert count("time") == 1
    assert page.locator("#chart-shares .label").all_text_contents() == ["gather-scatter"]
    chip.click()
    assert "All strategies are hidden" in page.locator("#chart-loss .plot").inner_text()


def test_hover_and_keys_read_values(visit: Any) -> None:
    page = visit(classic())
    plot = page.locator("#chart-loss svg.lines")
    plot.hover(position={"x": 500, "y": 100})
    readout = page.locator("#chart-loss .readout.on")
    assert "iteration" in readout.inner_text()
    assert "all-reduce" in readout.inner_text()
    page.mouse.move(0, 0)
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert readout.inner_text().startswith("iteration 2")
    page.locator("#chart-shares .piece.p-exposed_exchange").first.hover()
    assert "exposed exchange" in page.locator("#chart-shares .readout.on").inner_text()


def test_switches_change_the_scale(visit: Any) -> None:
    page = visit(classic())
    ticks = lambda: page.locator("#chart-time .grid text").all_text_contents()  # noqa: E731
    linear = ticks()
    page.locator("#chart-time [data-option=log]").click()
    assert ticks() != linear
    before = page.locator("#chart-shares .inside").first.text_content()
    page.locator("#chart-shares [data-option=share]").click()
    assert page.locator("#chart-shares .inside").first.text_content() != before
    assert page.locator("#chart-shares .inside").first.text_content().endswith("%")


def test_the_first_step_does_not_squash_the_others(visit: Any) -> None:
    made = samples.results(samples.run("ddp"))
    made["runs"][0]["step_ms_series"][0] = 60_000.0
    box = visit(made).locator("#chart-time .line path").first.bounding_box()
    assert box["height"] > 40


def test_scaling_charts(visit: Any) -> None:
    page = visit(samples.scaling())
    assert page.locator("#chart-speedup .line circle").count() == 6
    assert page.locator("#chart-efficiency .line circle").count() == 3
    assert page.locator("#scaling table tbody tr").count() == 3


@pytest.mark.parametrize("width", [320, 390, 768])
def test_narrow_screens_do_not_scroll_sideways(visit: Any, width: int) -> None:
    page = visit(classic(), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": 1000, "height": 800})
    page.wait_for_function("document.querySelector('#chart-loss svg').getBoundingClientRect().width > 800")


def test_dark_mode_has_light_ink(visit: Any) -> None:
    shades = {}
    for scheme in ("light", "dark"):
        page = visit(classic(), scheme=scheme)
        colours = page.evaluate(
            "(() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor] })()"
        )
        ink, paper = (sum(int(v) for v in c[4:-1].split(",")) for c in colours)
        shades[scheme] = (ink, paper)
    assert shades["light"][0] < 200 < 700 < shades["light"][1]
    assert shades["dark"][1] < 100 < 600 < shades["dark"][0]


def test_hostile_strings_run_nothing(visit: Any) -> None:
    hostile = "</script><script>window.owned=1</script><img src=x onerror='window.owned=1'>"
    run, crash = samples.run("ddp"), samples.crashed("x")
    run["strategy"] = crash["strategy"] = crash["error"]["traceback"] = run["wire"]["formula"] = hostile
    page = visit(samples.results(run, crash, title=hostile, warnings=[hostile]))
    assert page.evaluate("window.owned") is None
    assert page.locator("img").count() == 0
    assert page.title() == hostile
    page.locator("#chart-loss svg.lines").hover(position={"x": 300, "y": 100})
    assert page.locator("#chart-loss .readout bdi").first.inner_text().startswith("</script>")


def test_odd_shapes_draw_without_error(visit: Any) -> None:
    empty = samples.results()
    empty["runs"] = []
    diverged = samples.run("ddp")
    diverged["loss"] = [None] * 40
    many = [samples.run(f"strategy-{i}", seed=i, steps=700) for i in range(13)]
    for made in (empty, samples.results(samples.crashed()), samples.results(diverged), samples.results(*many)):
        visit(made)
    visit(samples.results(samples.run("ddp", steps=1)))
    page = visit(samples.results(samples.run("ddp", steps=20_000)))
    assert len(page.locator("#chart-time .line path").first.get_attribute("d")) < 100_000


def test_printing_opens_the_details(visit: Any) -> None:
    page = visit(classic())
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
