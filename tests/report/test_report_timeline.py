"""Traces in a page: columns decode to the spans, long traces show whole steps, panels match runs, names are escaped."""

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trace_samples as traced

import report_samples as samples
from syncline.report.html import render_html, write_html
from syncline.report.panels import MAX_FILE_BYTES, panel, traces
from syncline.report.spans import MAX_ROWS, columns, excerpt
from syncline.trace import Span, Trace
from syncline.trace.formats.load import load

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}<!--\u2028\u202e"


def numbers(packed: str) -> Iterator[int]:
    value = shift = 0
    for byte in base64.b64decode(packed):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0


def decoded(data: dict[str, Any], origin: int) -> list[Span]:
    """The columns read as the page's script reads them."""
    starts, lengths, which, steps = (numbers(data[key]) for key in ("start", "length", "kind", "step"))
    strings, kinds = data["strings"], data["kinds"]
    found = []
    for rank, lane, _, count in data["rows"]:
        at, step = origin, 0
        for _ in range(count):
            at += next(starts)
            turn = next(steps)
            step += -(turn + 1) // 2 if turn % 2 else turn // 2
            name, unit, size = kinds[3 * next(which) :][:3]
            found.append(Span(rank, strings[lane], strings[name], strings[unit], step, at, at + next(lengths), size))
    return found


def test_columns_decode_to_the_spans() -> None:
    made = [*traced.spans(ranks=3, steps=3), Span(0, "exchange", "odd", "x", -1, 7_000_000, 10**15, 2**40)]
    data = columns(made)
    json.dumps(data, allow_nan=False)
    order = lambda s: (s.rank, s.lane, s.start, s.end, s.unit, s.name)  # noqa: E731
    assert sorted(decoded(data, min(s.start for s in made)), key=order) == sorted(made, key=order)
    assert len(columns([])["rows"]) == 0


def test_streams_and_groups_are_tracks():
    made = columns([
        Span(0, "exchange", "all-reduce", "", 0, 0, 5, 0, "tp", "20"),
        Span(0, "exchange", "all-reduce", "", 0, 6, 9, 0, "dp", "20"),
        Span(0, "exchange", "all-reduce", "", 0, 9, 12),
    ])  # fmt: skip
    assert [made["strings"][row[4]] if row[4:] else "" for row in made["rows"]] == [
        "", "group dp, stream 20", "group tp, stream 20",
    ]  # fmt: skip


def test_spans_overlap_only_in_the_last_row() -> None:
    made = [Span(0, "exchange", "x", str(i), 0, i, 1000 + i) for i in range(40)]
    rows = columns(made)["rows"]
    assert [(slot, count) for _, _, slot, count in rows] == [(i, 1) for i in range(MAX_ROWS - 1)] + [
        (MAX_ROWS - 1, 40 - MAX_ROWS + 1)
    ]
    assert [row[2] for row in columns([Span(0, "data", "", "", 0, 5 * i, 5 * i + 5) for i in range(9)])["rows"]] == [0]


def test_a_hundred_thousand_spans_are_a_small_page() -> None:
    assert len(json.dumps(columns(traced.many()))) < 1_600_000


def test_a_long_trace_shows_whole_steps() -> None:
    made = traced.spans(steps=40)
    every = excerpt(made, limit=len(made))
    assert (every.spans, every.gap, every.sentence) == (made, None, "")
    some = excerpt(made, limit=len(made) // 2)
    kept = {span.step for span in some.spans}
    assert {0, 1, 38, 39} <= kept
    assert some.gap is not None
    assert kept == set(range(40)) - set(range(some.gap[0], some.gap[1] + 1))
    assert sum(step > 20 for step in kept) > 2 * sum(step < 20 for step in kept), "the steady ones are the larger part"
    for step in kept:
        assert sum(s.step == step for s in some.spans) == sum(s.step == step for s in made)
    assert f"Steps {some.gap[0]} to {some.gap[1]} are left out" in some.sentence
    huge = excerpt(made, limit=10)
    assert len(huge.spans) == 10
    assert "its 10 longest are shown" in huge.sentence


def test_runs_get_the_trace_of_their_strategy_and_world_size(tmp_path: Path) -> None:
    made = samples.results(samples.run("single"), samples.run("ddp", world=2), samples.run("ddp", world=4))
    for world, folder in ((4, "a"), (2, "b")):
        file = traced.write(tmp_path, "ddp", traced.spans(ranks=world), world=world, prediction_ms=8.5)
        file.parent.rename(file.parent.with_name(folder))
    traced.write(tmp_path, "left-over", traced.spans())
    found = traces(made, tmp_path)
    assert [(one.label, one.index) for one in found.panels] == [("ddp x2", 1), ("ddp x4", 2), ("left-over", -1)]
    assert len(found.panels[1].ranks) == 4
    names = [bar["name"] for bar in found.panels[0].bars]
    assert names[:2] == ["measured", "predicted"]
    assert found.panels[0].data["label"] == "ddp x2"
    assert "ddp x4" in render_html(made, folder=tmp_path)
    assert traces(made, tmp_path).panels[0].data["spans"] is found.panels[0].data["spans"], "read once"
    file = traced.write(tmp_path, "left-over", traced.spans(steps=9))
    assert len(traces(made, tmp_path).panels[2].data["spans"]["start"]) > len(found.panels[2].data["spans"]["start"])


def test_a_trace_in_memory_is_shown_as_from_its_file_and_the_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = traced.write(tmp_path / "a", "ddp", traced.spans())
    trace = load(file)
    shuffled = replace(trace, spans=sorted(trace.spans, key=lambda span: span.rank))
    from_file = traces(samples.results(), tmp_path / "a").panels[0]
    file = traced.write(tmp_path / "b", "ddp", traced.spans())
    monkeypatch.setattr("syncline.report.panels.load", pytest.fail)
    in_memory = traces(samples.results(), tmp_path / "b", new_trace=replace(shuffled, path=file)).panels[0]
    assert in_memory.data["spans"] == from_file.data["spans"]
    assert {**in_memory.analysis, "source": ""} == {**from_file.analysis, "source": ""}


def test_a_trace_that_cannot_be_read_is_named_and_the_page_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced.write(tmp_path, "ddp", traced.spans())
    broken = tmp_path / "runs" / "ring" / "trace.json.gz"
    broken.parent.mkdir()
    broken.write_bytes(b"no gzip")
    found = traces(samples.results(), tmp_path)
    assert len(found.panels) == 1
    assert found.notes[0].startswith("ring has no timeline: ")
    write_html(samples.results(), tmp_path / "report.html")
    assert "ring has no timeline" in (tmp_path / "report.html").read_text()
    assert MAX_FILE_BYTES > 1 << 20
    monkeypatch.setattr("syncline.report.panels.MAX_FILE_BYTES", 10)
    assert "syncline trace view" in traces(samples.results(), tmp_path).notes[0]


def test_whatever_goes_wrong_with_one_trace_the_page_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ddp", "ring"):
        traced.write(tmp_path, name, traced.spans())
    make = panel

    def odd(source: Trace, **options: Any) -> Any:
        return make(source, **options) if options["label"] == "ddp" else {}["x"]

    monkeypatch.setattr("syncline.report.panels.panel", odd)
    write_html(samples.results(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "ring has no timeline: KeyError" in text
    assert text.count('id="trace-') == 1


def test_a_prediction_with_too_many_digits_is_ignored(tmp_path: Path) -> None:
    made = panel(Trace.of(traced.spans(), metadata={"prediction_ms": 10**400}, path=tmp_path, split=False), label="x")
    assert "predicted" not in [bar["name"] for bar in made.bars]


def test_a_trace_without_steps_still_has_a_timeline() -> None:
    bare = [span for span in traced.spans() if span.lane != "step"]
    made = panel(Trace.of(bare, notes=("a note",), path=Path("x"), split=False), label="x")
    assert made.data["spans"]["rows"]
    assert made.notes[0] == "a note"
    with_nothing = panel(Trace.of([Span(0, "wait", "w", "", -1, 0, 5)], path=Path("x"), split=False), label="x")
    assert with_nothing.analysis["verdict"]["kind"] == "unclear"
    assert with_nothing.data["spans"]["rows"] == [[0, 2, 0, 1]]


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    names = [HOSTILE, "__proto__", "constructor", "half \ud800"]
    made = traced.spans(names=names)
    source = Trace.of(
        made, metadata={"notes": [HOSTILE]}, notes=(HOSTILE,), path=tmp_path / HOSTILE.replace("/", "-"), split=False
    )
    from syncline.report.html import render_view

    text = render_view([panel(source, label=HOSTILE)], title=HOSTILE, source=HOSTILE)
    assert text.count("<script") == text.count("</script>") == 3
    assert "<img" not in text
    assert "\u202e" not in text.split("<main>")[1].split("<footer>")[0]
    data = re.search(r'id="trace-0">(.*?)</script>', text, re.S)
    assert data
    strings = json.loads(data[1])["spans"]["strings"]
    assert any(name.startswith("</script>") for name in strings)
    assert {"__proto__", "constructor"} <= set(strings)


def test_traces_of_other_tools_make_a_page() -> None:
    fixtures = Path(__file__).parents[1] / "trace" / "fixtures"
    for name, lanes in (
        ("horovod-timeline.json", {"exchange", "wait"}),
        ("gloo-rank0.json.gz", {"forward", "backward"}),
    ):
        made = panel(load(fixtures / name), label=name)
        strings = made.data["spans"]["strings"]
        assert lanes <= {strings[lane] for _, lane, _, _ in made.data["spans"]["rows"]}
        assert made.analysis["verdict"]["sentence"]
