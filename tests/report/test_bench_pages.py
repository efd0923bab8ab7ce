"""Pages of benchmarks and sweeps in headless Chromium: charts are drawn from committed results, nothing is blocked."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from syncline.bench.codecs import table as codecs_table
from syncline.bench.overlap import table as overlap_table
from syncline.bench.quality import table as quality_table
from syncline.report.bench_pages import Table, sweep_page

pytestmark = pytest.mark.browser

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def visit(visit_file: Any, tmp_path: Path) -> Any:
    """Opens a page that is given as text."""

    def run(text: str) -> Any:
        path = tmp_path / "page.html"
        path.write_text(text)
        return visit_file(path)

    return run


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def test_codecs_have_a_line_each_and_one_legend(visit: Any) -> None:
    page = visit(codecs_table.page(result("codecs-cpu.json")))
    count = lambda part: page.locator(f"#chart-{part} .line").count()  # noqa: E731
    codecs = count("encode")
    assert codecs == count("decode") > 15
    page.locator("#chart-encode .chip").first.click()
    assert (count("encode"), count("decode")) == (codecs - 1, codecs - 1)
    assert "16.8 MB" in page.locator("#chart-encode").inner_text()


def test_small_shares_on_an_axis_are_not_written_as_zero(visit: Any) -> None:
    made = result("codecs-cpu.json")
    made["rows"][0]["encode_of_copy"] = 2e-5
    ticks = visit(codecs_table.page(made)).locator("#chart-encode text").all_text_contents()
    assert "0.01%" in ticks
    assert "0%" not in ticks


def test_every_codec_has_its_loss_beside_the_dense_one(visit: Any) -> None:
    made = result("quality.json")
    page = visit(quality_table.page(made))
    codecs = {(row["task"], row["network"], row["codec"], phase) for row in made["rows"] for phase in row["loss"]}
    assert page.locator(".chart").count() == len([codec for *_, codec, _ in codecs if codec != "none"])
    first = next(row for row in made["rows"] if row["codec"] != "none")
    same = [row for row in made["rows"] if (row["task"], row["network"]) == (first["task"], first["network"])]
    shown = [row for row in same if row["codec"] in ("none", first["codec"])]
    assert page.locator("#chart-loss-0-1 .line").count() == len(shown), "a line for each seed, also of dense"
    lossy = [row["task"] for row in made["summary"] if row["verdict"] in quality_table.BAD]
    assert page.locator("tr.crashed th").all_text_contents() == lossy


def test_overlap_has_bars_with_bounds_and_two_steps_on_one_scale(visit: Any) -> None:
    made = result("overlap-vgg11-4nodes-200mbit.json")
    made["rows"][1]["strategy"] = "<b>ddp"
    page = visit(overlap_table.page(made))
    bars = page.locator("#chart-steps")
    assert bars.locator(".piece").count() == bars.locator(".tick").count() == len(made["rows"])
    assert bars.locator(".range").count() == len(made["rows"])
    assert "<b>ddp" in bars.inner_text()
    two = page.locator("#two")
    two.scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('#two .says').textContent")
    assert all(name in two.inner_text() for name in made["pictured"])
    # Of the two steps, the one nearer to the median.
    for side, name in enumerate(made["pictured"]):
        marks = made["timelines"][name]["marks"]
        (median,) = (row["step_ms"] for row in made["rows"] if row["strategy"] == name)
        apart = [abs(end - begin - median) for begin, end in pairwise(marks)]
        assert two.locator(f'[data-side="{side}"][data-of="step"]').input_value() == str(apart.index(min(apart)))
    assert two.locator("canvas").bounding_box()["height"] > 150


def test_a_sweep_has_a_chart_for_each_number_of_nodes_and_marks_the_end(visit: Any) -> None:
    rows = [
        {"nodes": nodes, "bandwidth": bits, "dense_ms": 1e12 / bits, "bf16_ms": 5e11 / bits, "ms": 100.0 + 1e10 / bits}
        for nodes in (2, 8)
        for bits in (1e8, 1e9, 1e10)
    ]
    pays = [{"nodes": 2, "below": 2e9}, {"nodes": 8, "below": None}]
    page = visit(sweep_page(rows, pays, Table(["nodes"], [["2"]]), title="a <sweep>"))
    assert page.locator("#chart-nodes-2 .line").count() == 3
    assert page.locator("#chart-nodes-2 .xmark").count() == 1
    assert page.locator("#chart-nodes-8 .xmark").count() == 0
    assert "10 Gbit/s" in page.locator("#chart-nodes-8").inner_text()
    assert page.locator("h1").inner_text() == "a <sweep>"
