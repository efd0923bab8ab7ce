"""Import of Horovod timelines: phases, steps, late ranks, and files of killed runs."""

import json

import make_fixtures
import pytest
from trace_files import HOROVOD

from syncline.trace import Span, Trace, overlap, partition
from syncline.trace.formats.horovod_write import horovod_trace
from syncline.trace.formats.load import import_files


def test_the_fixture_is_what_its_script_writes():
    assert HOROVOD.read_text() == make_fixtures.horovod_timeline()


def test_phases_become_lanes_with_the_tensor_as_unit():
    found = import_files(HOROVOD)
    assert (found.kind, tuple(found.spans)) == ("horovod", (0, 1))
    first = [s for s in found.spans[0] if s.unit == "allreduce.fc1.weight" and s.step == 0]
    assert [(s.lane, s.name, s.end - s.start, s.bytes) for s in first] == [
        ("wait", "NEGOTIATE_ALLREDUCE", 30_000, 0),
        ("wait", "QUEUE", 30_000, 0),
        ("wait", "WAIT_FOR_DATA", 30_000, 0),
        ("encode", "MEMCPY_IN_FUSION_BUFFER", 30_000, 0),
        ("exchange", "all-reduce", 300_000, 4 * 512 * 512),
        ("decode", "MEMCPY_OUT_FUSION_BUFFER", 20_000, 0),
    ]
    steps = [s for s in found.spans[0] if s.lane == "step"]
    assert [(s.step, s.start % 10**12) for s in steps] == [(i, 10_000_000 + i * 8_000_000) for i in range(4)]
    turns = {s.step for s in found.spans[0] if s.unit == "allreduce.fc2.weight"}
    assert turns == {0, 1, 2, 3}
    assert {s.step for s in found.spans[0] if s.unit.startswith("broadcast")} == {0}, (
        "start-up goes with the first step"
    )
    assert len(found.notes) == 2


def test_ticks_show_which_rank_was_late():
    found = import_files(HOROVOD)
    waited = {
        rank: sum(s.end - s.start for s in found.spans[rank] if s.unit == "allreduce.fc1.bias" and "NEGO" in s.name)
        for rank in found.spans
    }
    assert waited == {0: 4 * 710_000, 1: 4 * 10_000}, "rank 0 waits for rank 1"


def test_the_partition_sums_and_overlap_is_unknown_without_compute():
    found = import_files(HOROVOD)
    whole = partition(found.spans[0])
    assert [sum(phases.values()) for phases in whole.values()] == [8_000_000] * 3 + [1_630_000]
    # Transfers of fc1.bias and fc2.weight overlap from 310 to 430 of 130..430 and 310..610, fc1.weight is by itself.
    assert whole[0]["exposed_exchange"] == 300_000 + 480_000 - _copies()
    assert overlap(found.spans[0]) is None


def _copies():
    """Copies win over exchanges: fc1.bias's copy in and fc2.weight's copy out lie under the other's transfer."""
    return 30_000 + 20_000


@pytest.mark.parametrize("end", ["", ",", ",\n", ',\n{"ph": "B", "na'])
def test_an_unterminated_array_is_normal(tmp_path, end):
    text = HOROVOD.read_text()
    (tmp_path / "t.json").write_text(text.removesuffix("]") + end)
    found = import_files(tmp_path / "t.json")
    assert found.spans == import_files(HOROVOD).spans


def test_a_run_killed_in_a_step_keeps_what_was_finished(tmp_path):
    text = HOROVOD.read_text()
    cut = text[: text.rindex('"name": "NCCL_ALLREDUCE"')]
    (tmp_path / "t.json").write_text(cut)
    found = import_files(tmp_path / "t.json")
    assert [s.step for s in found.spans[0] if s.lane == "step"] == [0, 1, 2, 3]
    assert any("phases were still open" in note for note in found.notes)


def test_a_tensor_with_its_own_frequency_is_assigned_by_time(tmp_path):
    events = []
    for step in range(6):
        for pid, name in ((1, "ALLREDUCE"), *([(2, "ALLREDUCE")] if step == 4 else [])):
            at = 1000 * step + 100 * pid
            events += [{"ph": "B", "name": name, "pid": pid, "ts": at}, {"ph": "E", "pid": pid, "ts": at + 50}]
    (tmp_path / "t.json").write_text(json.dumps(events))
    spans = import_files(tmp_path / "t.json").spans[0]
    assert [(s.lane, s.name, s.step) for s in spans if s.unit == "2"] == [("exchange", "all-reduce", 4)]
    assert [s.step for s in spans if s.lane == "exchange" and s.unit == "1"] == list(range(6))


def test_our_export_in_horovods_style_comes_back(tmp_path):
    spans = []
    for step in range(3):
        at = step * 1000
        for rank, joined in ((0, 100), (1, 300)):
            spans.append(Span(rank, "step", "step", "", step, at, at + 1000))
            spans.append(Span(rank, "exchange", "all-reduce", "fc", step, at + joined, at + 500, 64))
    cut = Trace.of(spans).spans
    (tmp_path / "t.json").write_text(json.dumps(horovod_trace(Trace.of(cut, split=False))))
    found = import_files(tmp_path / "t.json")
    for rank in (0, 1):
        wanted = [s for s in cut if s.rank == rank and s.lane != "step"]
        got = [s for s in found.spans[rank] if s.lane != "step"]
        origin = got[0].start - wanted[0].start
        assert [(s.lane, s.unit, s.step, s.start - origin, s.end - origin, s.bytes) for s in got] == [
            (s.lane, s.unit, s.step, s.start, s.end, s.bytes) for s in wanted
        ]
