"""Reading JSON as a stream: the same values as the standard library, limits, bounded memory."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trace_files import host

from syncline.errors import UsageError
from syncline.trace import Limits
from syncline.trace.formats import json_stream as jsonstream
from syncline.trace.formats.load import import_files
from syncline.trace.formats.trace_file import TraceFile

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=8), VALUES, st.integers(1, 40), st.booleans())
@example([], 1.0000000000000002e16, 4, False)
def test_events_are_those_of_the_standard_library_however_the_file_is_chunked(
    tmp_path_factory, events, header, chunk, packed
):
    path = tmp_path_factory.getbasetemp() / "stream.json"
    data = json.dumps(
        {"otherData": header, "x": [1], "traceEvents": events, "host_name": "h"}, ensure_ascii=False
    ).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    wanted = json.loads(data)
    file = TraceFile(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonstream, "_CHUNK", chunk)
        assert list(file.events()) == wanted["traceEvents"]
    assert (file.header, file.cut) == ({"otherData": wanted["otherData"], "host_name": "h"}, "")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 400), st.integers(1, 40))
def test_a_file_that_stops_early_gives_the_events_before(tmp_path_factory, size, chunk):
    events = [{"ph": "B", "name": f'a "{i}" \\', "pid": i, "ts": [i, {}]} for i in range(6)]
    path = tmp_path_factory.getbasetemp() / "cut.json"
    whole = json.dumps(events)
    path.write_text("[" + whole[1:][:size])
    file = TraceFile(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonstream, "_CHUNK", chunk)
        found = list(file.events())
    assert found == events[: len(found)]
    assert len(found) >= whole[: size + 1].count("}, {")
    assert bool(file.cut) == (size < len(whole) - 1)


@pytest.mark.parametrize(
    ("content", "limits", "message"),
    [
        ("", Limits(), "is empty"),
        ("hello", Limits(), "is not a trace: it starts with 'h'"),
        ('{"traceEvents": [{"a": 1}, oops]}', Limits(), "not valid JSON near byte 27"),
        ('{"traceEvents" [1]}', Limits(), "not valid JSON"),
        ("[" * 100_000, Limits(), "nest more than 32 deep: .*--limit depth=64"),
        ('[{"a": ' + "[" * 40 + "]" * 40 + "}]", Limits(), "nest more than 32 deep: .*--limit depth=64"),
        ('[{"a": "' + "x" * 300_000 + '"}]', Limits(), "more than 262,144 characters: .*--limit event_bytes=524288"),
        ("[" + '{"ph": "M"},' * 50 + "]", Limits(events=20), "more than 20 events: .*--limit events=40"),
        (" " * 100_000, Limits(bytes=50_000), "more than 50,000 bytes: .*--limit bytes=100000"),
        ('[{"pid": 1' + "0" * 5000 + "}]", Limits(), "not valid JSON"),
    ],
)
def test_broken_or_hostile_files_give_one_line(tmp_path, content, limits, message):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        import_files(tmp_path / "t.json", limits=limits)
    assert "\n" not in str(caught.value)


def test_a_gzip_bomb_is_refused_before_it_fills_the_memory(tmp_path):
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(b"[" + b" " * 50_000_000))
    tracemalloc.start()
    with pytest.raises(UsageError, match="more than 20,000,000 bytes"):
        import_files(tmp_path / "t.json.gz", limits=Limits(bytes=20_000_000))
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_a_large_trace_needs_the_memory_of_a_window(tmp_path):
    path = tmp_path / "rank0.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"schemaVersion": 1, "traceEvents": [')
        for step in range(50):
            at = step * 1000
            file.write(json.dumps(host(f"ProfilerStep#{step}", at, at + 999, cat="user_annotation")) + ",")
            file.write(json.dumps(host("autograd::engine::evaluate_function: X", at + 1, at + 900)) + ",")
            nested = [host("aten::mm", at + i, at + i + 1, padding="x" * 1500) for i in range(2, 202)]
            file.write(json.dumps(nested)[1:-1] + ",")
        file.write("]}")
    tracemalloc.start()
    found = import_files(path)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len([s for s in found.spans[0] if s.lane == lane]) for lane in ("step", "backward")] == [50, 50]
    assert held < 6_000_000, "16 MB of text: a window, one event and 100 spans"


def test_too_many_spans_are_refused(tmp_path):
    events = [host("aten::mm", i * 10, i * 10 + 5) for i in range(200)]
    (tmp_path / "t.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    with pytest.raises(UsageError, match=r"more than 100 spans: .*--limit spans=200 .*Limits\(spans=200\)"):
        import_files(tmp_path / "t.json", limits=Limits(spans=100))


def _packed(tmp_path, damage):
    path = tmp_path / "t.json.gz"
    whole = bytearray(
        gzip.compress(json.dumps({"traceEvents": [host(f"aten::{i}", i, i + 1) for i in range(2000)]}).encode())
    )
    path.write_bytes(damage(whole))
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:9], r"t.json.gz cannot be decompressed \(its compressed data ends early\)"),
        (lambda data: data[:-900], "ends after .* events .its compressed data ends early"),
        (lambda data: data[:2000] + bytes(200) + data[2200:], "its compressed data cannot be read: "),
        (lambda data: data[:-8] + bytes(4) + data[-4:], r"t.json.gz is damaged \(.*CRC check failed"),
    ],
)
def test_damaged_gzip_has_its_true_reason(tmp_path, damage, message):
    with pytest.raises(UsageError, match=message) as caught:
        import_files(_packed(tmp_path, damage))
    assert "JSON" not in str(caught.value)


def test_bytes_after_the_compressed_data_do_no_harm(tmp_path):
    assert import_files(_packed(tmp_path, lambda data: data + b"more")).spans
