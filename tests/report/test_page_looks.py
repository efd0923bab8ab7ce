"""Report, timeline and overlap pages at 1280 and 400 px: nothing overflows, no word is broken, colours agree."""

import json
from pathlib import Path
from typing import Any

import pytest
import trace_samples as traced

import report_samples as samples
from syncline.bench.overlap import table as overlap_table
from syncline.report.html import render_view, write_html
from syncline.report.panels import panel, traces
from syncline.trace.formats.load import load

pytestmark = pytest.mark.browser

LONG = "syncline(powersgd(rank=64,start=warm) | bf16, plan=first)"
OVERLAP = Path(__file__).parents[2] / "benchmarks" / "results" / "overlap-vgg11-4nodes-200mbit.json"

BROKEN_WORDS = """() => {
  const broken = [];
  for (const name of document.querySelectorAll("bdi, th, h1, h2, h3, .tag-kind, dt")) {
    if (name.closest("pre") || !name.offsetParent) continue;
    const walker = document.createTreeWalker(name, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      for (const word of walker.currentNode.data.matchAll(/[A-Za-z0-9_]+/g)) {
        const range = document.createRange();
        range.setStart(walker.currentNode, word.index);
        range.setEnd(walker.currentNode, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (lines.size > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
}"""
OVERFLOWING_CELLS = """() => [...document.querySelectorAll("th, td")]
  .filter((cell) => cell.offsetParent && cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.textContent)"""
COLOURS = """() => {
  const found = {};
  for (const name of document.querySelectorAll("bdi")) {
    const swatch = name.previousElementSibling;
    if (!name.textContent || !swatch?.classList.contains("swatch")) continue;
    (found[name.textContent] ??= []).push(getComputedStyle(swatch).backgroundColor);
  }
  for (const label of document.querySelectorAll(".bars .label")) {
    (found[label.textContent] ??= []).push(getComputedStyle(label.previousElementSibling).fill);
  }
  for (const lane of document.querySelectorAll(".lanes li")) {
    (found[`lane ${lane.textContent}`] ??= []).push(getComputedStyle(lane.firstChild).backgroundColor);
  }
  return found;
}"""


def report(folder: Path) -> Path:
    made = samples.results(*[samples.run(name, step=900.0 + i) for i, name in enumerate(("ddp", "single", LONG))])
    made["config"]["data"] = {"sizes": [32, 32], "flip": True}
    made["runs"][2]["step_ms_series"] = [value / 2 for value in made["runs"][2]["step_ms_series"]]
    made["runs"][2]["step_ms"]["median"] /= 2
    for name in ("ddp", LONG):
        traced.write(folder, name, traced.spans(ranks=4))
    write_html(made, folder / "report.html")
    return folder / "report.html"


def view(folder: Path) -> Path:
    file = traced.write(folder, LONG, traced.spans(ranks=4))
    path = folder / "view.html"
    path.write_text(render_view([panel(load(file), label=LONG)], title="A trace", source=str(file)))
    return path


def overlap(folder: Path) -> Path:
    path = folder / "overlap.html"
    path.write_text(overlap_table.page(json.loads(OVERLAP.read_text())))
    return path


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("page_of", [report, view, overlap])
def test_nothing_overflows_and_no_word_is_broken(tmp_path: Path, visit_file: Any, page_of: Any, width: int) -> None:
    page = visit_file(page_of(tmp_path), width=width)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.locator("#two").scroll_into_view_if_needed()  # it is drawn when it is seen
    page.locator("#two table").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(BROKEN_WORDS) == []
    assert page.evaluate(OVERFLOWING_CELLS) == []
    picture = page.screenshot(full_page=True, path=tmp_path / f"{page_of.__name__}-{width}.png")
    assert len(picture) > 30_000


def test_a_strategy_and_a_lane_have_one_colour_everywhere(tmp_path: Path, visit_file: Any) -> None:
    colours: dict[str, set[str]] = {}
    for page_of in (report, view, overlap):
        found = visit_file(page_of(tmp_path)).evaluate(COLOURS)
        assert {"lane forward", "lane exchange"} <= found.keys(), page_of.__name__
        for name, shades in found.items():
            colours.setdefault(name, set()).update(shades)
    assert {"ddp", "single", LONG} <= colours.keys()
    assert {name: shades for name, shades in colours.items() if len(shades) > 1} == {}


def test_a_narrow_table_shows_that_it_scrolls(tmp_path: Path, visit_file: Any) -> None:
    page = visit_file(report(tmp_path), width=400)
    table = page.locator("#summary .scroll").first
    assert table.evaluate("node => node.scrollWidth > node.clientWidth")
    assert "local" in table.evaluate("node => getComputedStyle(node).backgroundAttachment")


def test_the_timeline_opens_on_the_fastest_run(tmp_path: Path, visit_file: Any) -> None:
    page = visit_file(report(tmp_path))
    assert LONG in page.locator(".headline").inner_text()
    assert page.locator("[role=tab][aria-selected=true]").inner_text() == LONG
    assert page.locator(".run:not([hidden]) .timeline canvas").count() == 1
    assert traces(samples.results(samples.run("ddp")), tmp_path / "empty").opened == 0


def test_step_bars_have_a_scale_and_the_setup_no_python(tmp_path: Path, visit_file: Any) -> None:
    page = visit_file(report(tmp_path))
    assert "The height of a row is" in page.locator(".run:not([hidden]) .stepbars .note").inner_text()
    setup = page.locator("#setup").inner_text()
    assert "32, 32" in setup
    assert "yes" in setup
    assert "[" not in setup
    assert "True" not in setup
