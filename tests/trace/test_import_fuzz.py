"""Damaged and hostile traces give a usage error or a result that the analysis accepts, in short time."""

import gzip
import json
import re
import time
from dataclasses import replace

import diff_traces
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from trace_files import GLOO, HOROVOD, chrome_trace

from syncline.errors import UsageError
from syncline.report.panels import panel
from syncline.sim.replay.what_if import Replay
from syncline.trace import Limits, Span, Trace, overlap, partition
from syncline.trace.analysis.analyze import analyze
from syncline.trace.analysis.diff import diff, side
from syncline.trace.formats.load import import_files, load
from syncline.trace.merge.merge_ranks import Part
from syncline.trace.merge.metadata import checked_metadata
from syncline.trace.merge.rank_file import merge_folder, write_rank_file

ODD = [b"1e999", b"NaN", b"-1", b"1" + b"0" * 400, b'"x"', b"null", b"[]", b"{}", b"[[]]", b"true", b"9e15", b""]
NUMBER = re.compile(rb"-?\d+(\.\d+)?")


def _small_kineto():
    """The fixture with one event in six: small enough to try often, with events of every sort."""
    text = gzip.decompress(GLOO[0].read_bytes()).decode()
    head, _, rest = text.partition('"traceEvents": [')
    events = re.split(r"(?<=\n  }),", rest)
    kept = [e for i, e in enumerate(events[:-1]) if i % 6 == 0 or "Step#" in e or "gloo" in e or "Optimizer" in e]
    return (head + '"traceEvents": [' + ",".join(kept) + "]}").encode()


def _ours():
    spans = [Span(i % 2, lane, lane, "u", i, i * 100, i * 100 + 90) for i, lane in enumerate(["step", "exchange"] * 5)]
    return str(chrome_trace(Trace.of(spans, split=False))).replace("'", '"').encode()


SAMPLES = {"torch.profiler": _small_kineto(), "horovod": HOROVOD.read_bytes(), "syncline": _ours()}


HUGE = 10**400
TOLD = {
    "strategy": "ddp", "world_size": 2, "backend": "gloo", "bandwidth": 1e9, "prediction_ms": 20.0,
    "clock_error_ns": 5, "usage": {"0": [[step, 10**7, 10**5] for step in range(12)]}, "cores": {"h": 2},
    "hosts": {"0": "h", "1": "h"}, "recorder": {"dropped": 0, "every": 1, "overhead_ns_per_step": 9.5},
}  # fmt: skip
SPANS = diff_traces.trace(steps=12)
WHOLE = json.dumps(chrome_trace(Trace.of(SPANS, metadata=TOLD, split=False))).encode()


def told(path):
    """Everything that the commands make of a trace of ours; numbers in it are such that JSON has."""
    source = load(path)
    found = analyze(source).as_json("x")
    made = panel(source, label="x")
    mine = side(source)
    between = [
        diff(*two) for two in ((mine, side(Trace.of(SPANS, split=False))), (side(Trace.of(SPANS, split=False)), mine))
    ]
    json.dumps([found, made.data, [(bar["ms"], bar["width"]) for bar in made.bars]], allow_nan=False)
    assert [one.sentence for one in between]
    json.dumps([one.as_json() for one in between], allow_nan=False)
    replay = Replay(source, first=1)
    json.dumps([replay.error, [replay.ask(what).steps.median for what in ("2x", "no-straggler")]], allow_nan=False)
    return found


def check(path, data):
    """Load it, and analyse what came of it."""
    path.write_bytes(data)
    begin = time.process_time()
    ranks, message = {}, ""
    try:
        ranks = import_files(path, limits=Limits(bytes=5_000_000)).spans
    except UsageError as error:
        message = str(error)
    assert "\n" not in message
    for spans in ranks.values():
        lengths = {s.step: s.end - s.start for s in spans if s.lane == "step"}
        assert {step: sum(phases.values()) for step, phases in partition(spans).items()} == lengths
        assert overlap(spans) is None or 0 <= overlap(spans) <= 1
    Trace.of([span for spans in ranks.values() for span in spans])
    assert time.process_time() - begin < 1


@st.composite
def damaged(draw, kind):
    data = SAMPLES[kind]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["cut", "byte", "drop", "repeat", "number", "number"]))
        if how == "cut":
            data = data[:at]
        elif how == "byte":
            data = data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at + 1 :]
        elif how == "number":
            found = NUMBER.search(data, at)
            if found:
                data = data[: found.start()] + draw(st.sampled_from(ODD)) + data[found.end() :]
        else:
            length = draw(st.integers(1, 2000))
            piece = b"" if how == "drop" else data[at : at + length] * 2
            data = data[:at] + piece + data[at + length :]
    return data


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_samples_are_valid(tmp_path, kind):
    (tmp_path / "t.json").write_bytes(SAMPLES[kind])
    assert import_files(tmp_path / "t.json").kind == kind


@pytest.mark.parametrize("kind", SAMPLES)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_a_damaged_trace_never_crashes(tmp_path_factory, kind, data):
    check(tmp_path_factory.getbasetemp() / "fuzz.json", data.draw(damaged(kind)))


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_gzip_never_crashes(tmp_path_factory, at, byte, cut):
    packed = bytearray(PACKED)
    at %= len(packed)
    if cut:
        del packed[at:]
    else:
        packed[at] = byte
    check(tmp_path_factory.getbasetemp() / "fuzz.json.gz", bytes(packed))


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet='[]{}",:0123456789eE.-tfnul \\"', max_size=200), st.sampled_from(["", "[", '{"traceEvents": ['])
)
def test_text_of_json_characters_never_crashes(tmp_path_factory, text, start):
    check(tmp_path_factory.getbasetemp() / "fuzz.json", (start + text).encode())


PACKED = gzip.compress(SAMPLES["torch.profiler"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example([(120, b"NaN"), (7978, b"-1")], False)  # steps that overlap
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.sampled_from(ODD)), min_size=1, max_size=4), st.booleans())
def test_no_number_in_a_trace_of_ours_stops_a_command(tmp_path_factory, places, in_head):
    data = WHOLE
    for at, number in places:
        found = NUMBER.search(data, at % data.index(b"traceEvents") if in_head else at)
        if found:
            data = data[: found.start()] + number + data[found.end() :]
    path = tmp_path_factory.getbasetemp() / "whole.json"
    path.write_bytes(data)
    message = ""
    try:
        told(path)
    except UsageError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    "wrong",
    [
        {"bandwidth": HUGE},
        {"bandwidth": 1e-308},
        {"bandwidth": True},
        {"prediction_ms": HUGE},
        {"prediction_ms": -1},
        {"prediction_ms": float("inf")},
        {"usage": {"0": [[step, HUGE, HUGE] for step in range(12)]}},
        {"strategy": ["ddp"], "world_size": HUGE},
        {"origin_ns": HUGE, "clock_error_ns": float("nan"), "recorder": {"dropped": HUGE}, "cores": {"h": HUGE}},
    ],
)
def test_impossible_metadata_is_ignored(tmp_path, wrong):
    (tmp_path / "t.json").write_text(json.dumps(chrome_trace(Trace.of(SPANS, metadata={**TOLD, **wrong}, split=False))))
    found = told(tmp_path / "t.json")
    assert found["world_size"] == 2
    assert found["step_ms"]["median"] == pytest.approx(20, abs=2)


def test_valid_metadata_is_kept():
    assert checked_metadata({**TOLD, "more": [1, {"a": None}]}) == {**TOLD, "more": [1, {"a": None}]}
    assert checked_metadata([]) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [("bytes", HUGE), ("bytes", -1), ("step", HUGE), ("step", -HUGE)],
    ids=["huge", "negative", "far", "long ago"],
)
def test_spans_with_impossible_numbers_are_left_out(tmp_path, field, value):
    content = chrome_trace(Trace.of(SPANS, metadata=TOLD, split=False))
    odd = [event for event in content["traceEvents"] if event.get("cat") == "exchange" and event["args"]["step"] == 5]
    for event in odd:
        event["args"][field] = value
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert len(load(tmp_path / "t.json").spans) == len(SPANS) - len(odd)
    told(tmp_path / "t.json")


@pytest.mark.parametrize("odd", [{"bytes": HUGE}, {"step": HUGE}])
def test_a_row_of_a_rank_file_with_such_a_number_ends_it(tmp_path, odd):
    good = [span for span in SPANS if span.rank == 0]
    write_rank_file(Part(0, [*good, replace(good[0], **odd)], "h", None), tmp_path, world_size=1)
    merged = merge_folder(tmp_path)
    assert len(merged.spans) == len(good)
    assert "is broken in line" in merged.notes[0]


def test_steps_of_no_length_are_a_usage_error_or_unknown():
    still = [Span(s.rank, s.lane, s.name, s.unit, s.step, s.step, s.step, s.bytes) for s in SPANS]
    with pytest.raises(UsageError, match="take no time"):
        Replay(Trace.of(still, split=False), first=1)
    found = diff(side(Trace.of(still, split=False)), side(Trace.of(SPANS, split=False)))
    assert (found.kind, found.exit_code) == ("unknown", 2)
    assert "steps of A take no time" in found.as_json()["verdict"]["sentence"]
    assert diff(side(Trace.of(SPANS, split=False)), side(Trace.of(still, split=False))).kind == "faster"
