"""A trace as a table of spans, units ranked by their cost per step, notes said once."""

import sys
from types import ModuleType

from analysis_spans import MS, span, steps
from trace_files import host, kineto

from syncline.trace import Span, Trace, analyze, load
from syncline.trace.formats.chrome_write import write_chrome_trace


def test_spans_as_rows_and_as_a_frame(tmp_path, monkeypatch):
    spans = [
        Span(1, "exchange", "all-reduce", "bucket 0", 3, 5 * MS, 9 * MS, 800, "tp", "20"),
        Span(0, "forward", "forward", "", 3, 2 * MS, 4 * MS),
    ]
    write_chrome_trace(Trace.of(spans, split=False), tmp_path / "t.json")
    trace = load(tmp_path / "t.json")
    first, second = trace.rows()
    assert first == {
        "rank": 0, "step": 3, "lane": "forward", "name": "forward", "unit": "", "group": "", "stream": "",
        "start_ms": 0.0, "ms": 2.0, "bytes": 0, "start_ns": 2 * MS, "end_ns": 4 * MS,
    }  # fmt: skip
    assert (second["start_ms"], second["ms"], second["bytes"]) == (3.0, 4.0, 800)
    assert (second["group"], second["stream"]) == ("tp", "20")

    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    assert trace.frame() == [first, second]
    pandas = ModuleType("pandas")
    pandas.DataFrame = lambda rows: ("frame", rows)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert trace.frame() == ("frame", [first, second])
    assert Trace([], []).rows() == []


def test_a_unit_of_few_steps_ranks_by_its_cost_per_step():
    spans = steps(20, [("forward", 5), ("backward", 5), ("exchange", 4, "every step", 800)])
    rare = next(s for s in spans if s.lane == "step" and s.step == 12)
    spans.append(span("exchange", rare.start / MS, rare.start / MS + 5, unit="once", step=12, size=800))
    spans = [s for s in spans if not (s.lane == "forward" and s.step == 12)]
    units = analyze(Trace.of(spans)).units
    assert [unit.unit for unit in units] == ["every step", "once"]
    assert units[1].exposed_ms < 1 < units[1].transfer_ms
    assert units[1].count < 0.1


def test_a_note_of_several_ranks_is_said_once(tmp_path):
    for rank in range(4):
        events = [host("ProfilerStep#1", 0, 100, cat="user_annotation"), host("aten::mm", 10, 50)]
        events += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 7, "ts": "?"}] * (rank + 1)
        kineto(tmp_path / f"rank{rank}.json", events, rank=rank, world=4)
    notes = load(tmp_path).notes
    assert len([note for note in notes if "no collectives" in note]) == 1
    assert any(note.startswith("ranks 0-3: it holds no collectives") for note in notes)
    assert len([note for note in notes if "1 to 4" in note and note.startswith("ranks 0-3: ")]) == 1
