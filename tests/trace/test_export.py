"""Export: Chrome and Horovod trace files, arrows, counters, and reading Syncline's own files back."""

import gzip
import json
import math

import pytest
from chrome_checker import check, ns
from hypothesis import given
from hypothesis import strategies as st
from trace_files import chrome_trace

from syncline.errors import UsageError
from syncline.trace import LANES, Span, Trace
from syncline.trace.formats.chrome_events import micros
from syncline.trace.formats.chrome_read import read_chrome_trace
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.formats.horovod_write import horovod_trace, operation
from syncline.trace.merge.merge_ranks import Part
from syncline.trace.merge.rank_file import rank_file_name, read_rank_file, write_rank_file

NAMES = st.sampled_from(["all-reduce", "ring", "blocked", "encode", "broadcast", 'a "b" \\ c'])
UNITS = st.sampled_from(["", "conv1", "conv1[0]", "gewicht ü"])
ANY_SPANS = st.lists(
    st.builds(
        lambda rank, lane, name, unit, step, start, length, size: Span(
            rank, lane, name, unit, step, start, start + length, size
        ),
        st.integers(0, 2), st.sampled_from((*LANES, "step")), NAMES, UNITS, st.integers(0, 2),
        st.integers(-40, 40) | st.integers(10**15, 10**15 + 50), st.integers(0, 30), st.integers(0, 10**9),
    ),
    max_size=25,
)  # fmt: skip


@given(st.integers(0, 40 * 86_400 * 10**9))
def test_times_come_back_to_the_nanosecond(time):
    assert int(micros(time) * 1000.0) == time, "as Perfetto reads them"
    assert round(micros(time) * 1000) == time
    assert math.isclose(micros(time), time / 1000)


@given(ANY_SPANS)
def test_any_spans_export_to_tracks_on_which_they_nest(spans):
    tracks = check(chrome_trace(Trace.of(spans)))
    assert sum(map(len, tracks.values())) >= len(spans)


@given(ANY_SPANS)
def test_any_spans_export_in_horovods_style(spans):
    tracks = check(horovod_trace(Trace.of(spans)))
    assert not any(slice[2] in ("forward", "blocked") for slices in tracks.values() for slice in slices)


def test_more_than_a_hundred_spans_at_once_get_separate_tracks():
    spans = [Span(0, lane, "x", str(i), 0, i, 1000 + i) for i in range(150) for lane in ("encode", "exchange")]
    assert len(check(chrome_trace(Trace.of(spans, split=False)))) == 300


def test_spans_one_after_the_other_share_a_track_of_their_lane():
    spans = [Span(0, "forward", "f", "", i, 10 * i, 10 * i + 10) for i in range(5)]
    spans += [Span(0, "exchange", "e", "", 0, 0, 30), Span(0, "exchange", "e", "b", 0, 10, 20)]
    trace = chrome_trace(Trace.of(spans, split=False))
    assert sorted(map(len, check(trace).values())) == [1, 1, 5]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["forward", "exchange", "exchange 2"]


STRAGGLER = [
    Span(0, "exchange", "all-reduce", "w", 0, 10, 90, 800),
    Span(1, "exchange", "all-reduce", "w", 0, 50, 90, 800),
    Span(2, "exchange", "all-reduce", "w", 0, 30, 95, 800),
]


def test_arrows_go_from_the_last_rank_to_those_that_waited():
    trace = chrome_trace(Trace.of(STRAGGLER))
    check(trace)
    arrows = [(e["ph"], e["pid"], ns(e["ts"])) for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert sorted(arrows) == [("f", 0, 40), ("f", 2, 40), ("s", 1, 40), ("s", 1, 40)]


def test_no_arrows_without_waits():
    together = [Span(rank, "exchange", "all-reduce", "w", 0, 10, 90) for rank in range(3)]
    assert not [event for event in chrome_trace(Trace.of(together))["traceEvents"] if event["ph"] in "sf"]


def test_counters_show_bytes_in_flight_and_rate():
    spans = [Span(0, "exchange", "e", "a", 0, 0, 2000, 1000), Span(0, "exchange", "e", "b", 0, 1000, 3000, 500)]
    told = [event for event in chrome_trace(Trace.of(spans))["traceEvents"] if event["ph"] == "C"]
    assert [event["args"]["bytes"] for event in told if event["name"] == "in flight"] == [1000, 1500, 500, 0]
    # 1000 bytes in 2 microseconds are 4 Gbit/s.
    assert [event["args"]["Mbit/s"] for event in told if event["name"] == "sending"] == [4000, 6000, 2000, 0]


def test_a_written_trace_is_read_back_with_the_same_spans(tmp_path):
    spans = [*Trace.of(STRAGGLER).spans, Span(1, "step", "step", "", 3, 10**15 + 1, 10**15 + 7)]
    write_chrome_trace(Trace.of(spans, metadata={"backend": "gloo"}, split=False), tmp_path / "t.json.gz")
    again = read_chrome_trace(tmp_path / "t.json.gz")
    assert sorted(again.spans, key=repr) == sorted(spans, key=repr)
    assert (again.metadata["backend"], again.notes) == ("gloo", ())


def test_a_truncated_trace_gives_what_it_holds(tmp_path):
    spans = [Span(0, "forward", "f", "", i, 10 * i, 10 * i + 5) for i in range(500)]
    path = tmp_path / "t.json"
    write_chrome_trace(Trace.of(spans, split=False), path)
    path.write_bytes(path.read_bytes()[:-5000])
    again = read_chrome_trace(path)
    assert again.spans == spans[: len(again.spans)]
    assert 400 < len(again.spans) < 500
    assert "t.json ends after" in again.notes[0]


@pytest.mark.parametrize("text", ['{"traceEvents": []}', "[]", '[{"ph": "X", "name": "aten::add", "ts": 1, "dur": 2}]'])
def test_a_trace_of_another_tool_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UsageError, match="no spans of Syncline's"):
        read_chrome_trace(tmp_path / "t.json")


EVENT = st.dictionaries(
    st.sampled_from(["ph", "cat", "pid", "tid", "name", "ts", "dur", "args"]),
    st.sampled_from(["X", "forward", "exchange", 0, 1.5, -3, True, None, {"unit": "", "step": 1, "bytes": 0}, 1e300]),
)


@given(st.lists(EVENT, max_size=5))
def test_no_event_makes_reading_crash(tmp_path_factory, events):
    path = tmp_path_factory.mktemp("odd") / "t.json"
    ours = {
        "ph": "X",
        "cat": "step",
        "pid": 0,
        "name": "s",
        "ts": 0,
        "dur": 1,
        "args": {"unit": "", "step": 0, "bytes": 0},
    }
    path.write_text(json.dumps([*events, ours]))
    check(chrome_trace(read_chrome_trace(path)))


def test_process_groups_and_streams_have_tracks_of_their_own_and_survive_the_file(tmp_path):
    spans = [
        Span(0, "forward", "gemm", "", 0, 0, 10, stream="7"),
        Span(0, "forward", "copy", "", 0, 2, 6, stream="13"),
        Span(0, "exchange", "all-reduce", "a", 0, 5, 9, 8, "tp", "20"),
        Span(0, "exchange", "all-gather", "b", 0, 20, 29, 8, "dp", "24"),
    ]
    write_chrome_trace(Trace.of(spans, split=False), tmp_path / "t.json")
    assert sorted(read_chrome_trace(tmp_path / "t.json").spans, key=spans.index) == spans
    events = chrome_trace(Trace.of(spans, split=False))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [
        "forward, stream 7", "forward, stream 13", "exchange, group dp, stream 24", "exchange, group tp, stream 20",
    ]  # fmt: skip
    write_rank_file(Part(0, spans), tmp_path, world_size=1)
    assert read_rank_file(tmp_path / rank_file_name(0)).part.spans == spans


COURSE = [
    Span(0, "step", "step", "", 4, 0, 200),
    Span(0, "forward", "forward", "", 4, 0, 10),
    Span(0, "wait", "blocked", "", 4, 150, 160),
    Span(0, "encode", "encode", "w", 4, 10, 20),
    Span(0, "exchange", "all-reduce", "w", 4, 30, 90, 800),
    Span(0, "decode", "decode", "w", 4, 90, 95),
    Span(1, "exchange", "all-reduce", "w", 4, 50, 90, 800),
]


def test_a_row_of_horovods_timeline():
    events = horovod_trace(Trace.of(COURSE), backend="nccl")
    tracks = check(events)
    (waiting, late) = [sorted(slices, key=lambda s: (s[0], -s[1])) for slices in tracks.values()]
    assert waiting == [
        (10, 30, "ALLREDUCE"), (10, 20, "MEMCPY_IN_FUSION_BUFFER"), (20, 30, "QUEUE"),
        (30, 50, "NEGOTIATE_ALLREDUCE"), (30, 30, "0"),
        (50, 95, "ALLREDUCE"), (50, 90, "NCCL_ALLREDUCE"), (50, 50, "1"), (90, 95, "MEMCPY_OUT_FUSION_BUFFER"),
    ]  # fmt: skip
    assert sorted(late) == [(50, 90, "ALLREDUCE"), (50, 90, "NCCL_ALLREDUCE")]
    assert [e["args"]["name"] for e in events if e["name" if "name" in e else "ph"] == "process_name"] == ["steps", "w"]
    cycles = [e for e in events if e["ph"] == "i"]
    assert [(e["name"], ns(e["ts"]), e["args"]["step"]) for e in cycles] == [("CYCLE_START", 0, 4)]


def test_operations_with_a_gap_between_are_two():
    twice = [Span(0, "exchange", "all-reduce", "b", 0, 0, 10), Span(0, "exchange", "all-reduce", "b", 0, 50, 60)]
    ((*slices,),) = check(horovod_trace(Trace.of(twice, split=False))).values()
    assert sorted(s[:2] for s in slices if s[2] == "ALLREDUCE") == [(0, 10), (50, 60)]


def test_names_of_operations():
    assert [operation(name) for name in ("gather", "push-pull", "hierarchical(local=2)", "")] == [
        "GATHER", "PUSHPULL", "HIERARCHICAL", "EXCHANGE",
    ]  # fmt: skip


def test_the_same_spans_give_the_same_file(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        write_chrome_trace(Trace.of(STRAGGLER, split=False), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes())) == chrome_trace(
        Trace.of(STRAGGLER, split=False)
    )
