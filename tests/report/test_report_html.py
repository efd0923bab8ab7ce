"""The page as text: self-contained, escaped, complete."""

import base64
import hashlib
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import report_samples as samples
from syncline.report.html import SECTIONS, embed, render_html, write_html
from syncline.report.page import flatten
from syncline.results.schema import validate

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}<!--\u2028\u202e"


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def test_nothing_is_fetched() -> None:
    page = render_html(samples.results())
    outside = [url for url in re.findall(r"(?:src|href)=\"([^\"]*)\"", page) if not url.startswith("data:")]
    assert outside == []
    assert "@import" not in page
    assert "fetch(" not in page


def test_policy_allows_exactly_our_style_and_script() -> None:
    page = render_html(samples.results())
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])  # type: ignore[index]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for kind, tag in (("style", "style"), ("script", "script")):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        assert len(body) == 1
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\sstyle=|\son\w+=\"", page.split("<script")[0])


def test_hostile_strings_are_escaped_everywhere() -> None:
    run, crash = samples.run("ddp"), samples.crashed("x")
    run["strategy"] = crash["strategy"] = HOSTILE
    run["wire"]["formula"] = HOSTILE
    run["startup_ms"] = {HOSTILE: 5.0}
    run["ranks"][0]["host"] = HOSTILE
    crash["error"] = {"rank": 0, "summary": HOSTILE, "traceback": HOSTILE}
    bad = {HOSTILE: HOSTILE}
    made = samples.results(
        run, crash, title=HOSTILE, created=HOSTILE, warnings=[HOSTILE], config=bad, environment=bad | {"cpu": HOSTILE}
    )
    page = render_html(validate(made))
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "49" not in page.split("<main>")[0].split("</style>")[1]
    assert data_of(page)["runs"][0]["label"].startswith("</script>")
    assert "&lt;/script&gt;" in page


def test_embedded_data_round_trips() -> None:
    data = {"a": HOSTILE, "b": [1.5, None, True]}
    assert json.loads(embed(data)) == data
    assert not set("<>&\u2028") & set(embed(data))


def test_a_lone_surrogate_does_not_stop_the_report(tmp_path: Path) -> None:
    write_html(samples.results(title="half \ud800"), tmp_path / "report.html")
    assert "half" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_figures_that_are_not_finite_become_gaps() -> None:
    run = samples.run("ddp")
    run["loss"][4] = math.nan
    run["step_ms"] = dict.fromkeys(run["step_ms"], math.nan) | {"n": 0}
    run["samples_per_s"] = math.inf
    page = render_html(samples.results(run, samples.run("single")))
    assert data_of(page)["runs"][0]["loss"][4] is None
    assert not re.search(r">\s*(nan|inf)\b", page)


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [samples.run("ddp")],
        [samples.run("ddp", steps=1)],
        [samples.run("single")],
        [samples.crashed()],
        [samples.crashed(steps=3), samples.run("single")],
        [{"strategy": "x", "status": "crashed", "error": {"rank": -1, "summary": "", "traceback": ""}}],
        [samples.run(f"s{i}") for i in range(14)],
        [samples.run("ddp", steps=900)],
    ],
    ids=["none", "one", "one-step", "single", "crashed", "partial", "bare", "fourteen", "long"],
)
def test_every_shape_of_results_renders(runs: list[Any]) -> None:
    made = samples.results()
    made["runs"] = runs
    page = render_html(validate(made))
    assert page.count('class="verdict ') == len(runs)
    assert len(data_of(page)["runs"]) == len(runs)


def test_a_minimal_file_renders() -> None:
    assert "Nothing was run" in render_html(validate({"schema": 1, "runs": []}))


def test_sections_appear_when_they_have_something_to_show() -> None:
    ids = lambda page: set(re.findall(r'<section id="(\w+)"', page))  # noqa: E731
    full = ids(render_html(samples.results(samples.run("single"), samples.run("ddp"), samples.crashed())))
    assert full == set(SECTIONS) - {"scaling", "timeline", "changes"}
    assert "scaling" in ids(render_html(samples.scaling()))
    assert ids(render_html(samples.results(samples.crashed()))) == {"verdicts", "summary", "crashes", "setup"}


def test_write_replaces_in_one_move(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write_html(samples.results(), path)
    write_html(samples.results(title="second"), path)
    assert "<title>second</title>" in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_hundreds_of_iterations_stay_small() -> None:
    page = render_html(samples.results(*[samples.run(name, steps=1000) for name in samples.STRATEGIES]))
    assert len(page) < 600_000


def test_flatten_keeps_order_and_depth() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": {}}) == [
        ("a.b", "1"),
        ("a.c.d", "none"),
        ("e", "1, 2"),
    ]
