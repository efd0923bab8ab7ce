"""Freezes and reshapes in a report: steps before and after each, pay-back, and the shape over time."""

import pytest
import trace_samples as traced

import report_samples as samples
from syncline.report.changes import changes, shape_over_time
from syncline.report.html import render_html
from syncline.trace.span import STEP, Span

MS = 1_000_000


def _run():
    """Steps of 10 ms, a freeze and a reshape, steps of 4 ms, a freeze, steps of 4 ms; rank 1 is the same."""
    script = [(STEP, "step", "", 10)] * 3
    script += [("between", "freeze", "2 of 6 blocks", 1), ("between", "reshape", "4x1 -> 2x2", 17)]
    script += [*[(STEP, "step", "", 4)] * 3, ("between", "freeze", "4 of 6 blocks", 1), *[(STEP, "step", "", 4)] * 3]
    spans = []
    for rank in (0, 1):
        now = step = 0
        for lane, name, unit, ms in script:
            spans.append(Span(rank, lane, name, unit, step, now, now + ms * MS))
            now += ms * MS
            step += lane == STEP
    return spans


def test_each_change_has_its_cost_the_steps_around_it_and_when_it_is_paid_back():
    found = changes(_run())
    assert [(c.name, c.what, c.step, c.cost_ms) for c in found] == [
        ("freeze", "2 of 6 blocks", 3, 1.0),
        ("reshape", "4x1 -> 2x2", 3, 17.0),
        ("freeze", "4 of 6 blocks", 6, 1.0),
    ]
    assert [(c.before_ms, c.after_ms) for c in found] == [(10, 4), (10, 4), (4, 4)]
    assert found[0].payback_s == found[1].payback_s == pytest.approx(18 / 6 * 4 / 1e3), "they come together"
    assert found[2].payback_s is None, "steps are not shorter afterwards"
    assert changes([span for span in _run() if span.lane == STEP]) == []


def test_the_shape_over_time_is_level_between_changes_and_sloped_during_them():
    lines = {line["name"]: line["points"] for line in shape_over_time(_run())}
    assert lines["frozen blocks"][:3] == [[0.0, 0], [0.03, 0], [0.031, 2]]
    assert lines["stages"][-1] == [0.073, 2]
    assert [point[1] for point in lines["replicas"]] == [1, 1, 1, 1, 2, 2, 2, 2]
    frozen_only = [span for span in _run() if span.name != "reshape"]
    assert [line["name"] for line in shape_over_time(frozen_only)] == ["frozen blocks"]
    assert shape_over_time([]) == []


def test_the_report_of_a_run_that_freezes_has_a_chart_and_a_table(tmp_path):
    made = samples.results(samples.run("ddp", world=4))
    traced.write(tmp_path, "ddp", traced.spans())
    assert 'id="changes"' not in render_html(made, folder=tmp_path)
    traced.write(tmp_path, "ddp", [*traced.spans(), Span(0, "between", "freeze", "2 of 6 <b>blocks", 2, 1, 2_000_001)])
    page = render_html(made, folder=tmp_path)
    assert 'data-chart="shape-0"' in page
    assert "2 of 6 &lt;b&gt;blocks" in page
